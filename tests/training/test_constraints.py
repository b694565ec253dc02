"""Targets, multipliers and the mean over tasks."""

import pytest
import torch

from elastic_compile.training.constraints import (
    Multipliers,
    Target,
    resolve_targets,
    task_weights,
)


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (0.7, 0.7, 0.7, "0.7"),
        (".7", 0.7, 0.7, "0.7"),
        (1, 1, 1, "1"),
        (".9:1", 0.9, 1, "0.9:1"),
        ((0.2, 0.4), 0.2, 0.4, "0.2:0.4"),
        (Target(0.1, 0.2), 0.1, 0.2, "0.1:0.2"),
    ],
)
def test_targets(value, low, high, text):
    target = Target.parse(value)
    assert (target.low, target.high) == (low, high) and str(target) == text


@pytest.mark.parametrize("value", ["", "x", "1:2:3", "nan", "1.1", "-.1", ".5:.4", None, "inf", []])
def test_bad_targets(value):
    with pytest.raises(ValueError, match="a number from 0 to 1 or an interval"):
        Target.parse(value)


def test_every_task_needs_a_target():
    preset = {"code": Target(1, 1)}
    found = resolve_targets(["qa", "code"], {"qa": ".5:.6"}, preset)
    assert found == {"qa": Target(0.5, 0.6), "code": Target(1, 1)}
    assert resolve_targets(["code"], {"code": 0.2}, preset)["code"] == Target(0.2, 0.2)
    with pytest.raises(ValueError, match="no target for the task 'qa': give --target qa=T"):
        resolve_targets(["qa", "code"], {}, preset)
    with pytest.raises(ValueError, match="given for cod, but the data has only the tasks code"):
        resolve_targets(["code"], {"cod": 0.2}, preset)
    with pytest.raises(ValueError, match="task 'code': a target is a number"):
        resolve_targets(["code"], {"code": "much"}, preset)


def penalty(form, ratio, low, high, linear=2.0, quadratic=3.0):
    multipliers = Multipliers(1, form=form)
    with torch.no_grad():
        multipliers.linear.fill_(linear)
        multipliers.quadratic.fill_(quadratic)
    omega = torch.tensor([ratio], requires_grad=True)
    value = multipliers(omega, torch.tensor([low]), torch.tensor([high]), torch.tensor([0]))
    gradients = torch.autograd.grad(value.sum(), [omega, multipliers.linear, multipliers.quadratic])
    return (value.item(), *(g.item() for g in gradients))


def test_distance_form():
    """λ1 |Ω - t| + λ2 (Ω - t)²: pulled to the target from both sides, λ grows on both."""
    assert penalty("distance", 0.9, 0.7, 0.7) == pytest.approx((0.4 + 0.12, 3.2, 0.2, 0.04))
    assert penalty("distance", 0.5, 0.7, 0.7) == pytest.approx((0.4 + 0.12, -3.2, 0.2, 0.04))
    assert penalty("distance", 0.5, 0.5, 0.5) == pytest.approx((0, 0, 0, 0))


def test_signed_form():
    """λ1 (Ω - t) + λ2 (Ω - t)²: below the target λ1 falls, and may become negative."""
    assert penalty("signed", 0.9, 0.7, 0.7) == pytest.approx((0.4 + 0.12, 3.2, 0.2, 0.04))
    assert penalty("signed", 0.5, 0.7, 0.7) == pytest.approx((-0.4 + 0.12, 0.8, -0.2, 0.04))
    assert penalty("signed", 0.5, 0.5, 0.5) == pytest.approx((0, 2.0, 0, 0))


@pytest.mark.parametrize("form", ["distance", "signed"])
def test_no_penalty_inside_an_interval(form):
    for ratio in (0.7, 0.8, 0.9):
        assert penalty(form, ratio, 0.7, 0.9) == pytest.approx((0, 0, 0, 0))
    above = penalty(form, 1.0, 0.7, 0.9)
    assert above == pytest.approx((0.2 + 0.03, 2 + 0.6, 0.1, 0.01), abs=1e-6)
    below = penalty(form, 0.6, 0.7, 0.9)
    sign = 1 if form == "distance" else -1
    assert below == pytest.approx((sign * 0.2 + 0.03, -sign * 2 - 0.6, sign * 0.1, 0.01), abs=1e-6)


def test_tasks_have_multipliers_of_their_own():
    multipliers = Multipliers(3, seed=5)
    task, ratio = torch.tensor([2, 0, 2]), torch.tensor([0.5, 0.5, 0.9])
    value = multipliers(ratio, torch.full((3,), 0.7), torch.full((3,), 0.7), task)
    value.sum().backward()
    assert multipliers.linear.grad.tolist() == pytest.approx([0.2, 0, 0.4])
    assert multipliers.quadratic.grad.tolist() == pytest.approx([0.04, 0, 0.08])


def test_multipliers_start_at_random_below_one_half_and_ascend():
    multipliers = Multipliers(200, seed=1)
    start = torch.cat([multipliers.linear, multipliers.quadratic]).detach()
    assert start.min() >= 0 and start.max() < 0.5 and start.std() > 0.1
    assert torch.equal(Multipliers(200, seed=1).linear, multipliers.linear)
    optimizer = torch.optim.AdamW(
        [{"params": multipliers.parameters(), "lr": 0.1, "weight_decay": 0.0, "maximize": True}]
    )
    before = multipliers.linear.detach().clone()
    task = torch.arange(200)
    multipliers(torch.full((200,), 0.5), torch.ones(200), torch.ones(200), task).sum().backward()
    optimizer.step()
    assert torch.allclose(multipliers.linear, before + 0.1, atol=1e-4)


def test_projection():
    for form, expected in (("distance", 0.0), ("signed", -1.0)):
        multipliers = Multipliers(1, form=form)
        multipliers.linear.data.fill_(-1.0)
        multipliers.project()
        assert multipliers.linear.item() == expected
    with pytest.raises(ValueError, match="allowed: distance, signed"):
        Multipliers(1, form="squared")


def test_a_task_counts_once_however_many_samples_it_has():
    assert task_weights([0, 0, 0, 2]) == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])
    assert task_weights([4]) == [1.0]
    assert sum(task_weights([0, 1, 1, 5, 5, 5, 5])) == pytest.approx(1.0)
