"""Training: gradients, the frozen backbone, accumulation, checkpointing, resuming, errors."""

import copy
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import elastic_compile
from elastic_compile import _state
from elastic_compile import fit as fit_command
from elastic_compile.training import TrainingDiverged, _losses, evaluate
from elastic_compile.training import trainer as trainer_
from elastic_compile.training.constraints import Multipliers
from elastic_compile.training.data import Encoder, pad_samples
from elastic_compile.training.relaxation import GumbelRelaxation, sample_noise, sparsity_ratio
from elastic_compile.training.settings import PRESETS, FitSettings, choose
from elastic_compile.training.tasks import load_sources
from tests.training import helpers
from tests.training.helpers import LENGTH, plain, rows, run, sites, stir, tiny, tokenizer

ROOT = Path(__file__).parents[2]


def batch(data=None):
    sources = load_sources(rows() if data is None else data, Encoder(tokenizer(), LENGTH))
    return [source.sample(i) for source in sources for i in range(len(source))]


def relaxed(model, samples, temperature=1.0, seed=0):
    """Losses [B], Ω_MSR [B] and routes of one relaxed forward pass."""
    relaxation = GumbelRelaxation()
    for site in sites(model):
        site.relaxation = relaxation
    inputs = pad_samples(samples)
    noise = sample_noise(seed, range(len(samples)), len(sites(model)), sites(model)[0].kv_heads)
    relaxation.begin(noise, temperature)
    previous = _state.set_limit(_state.Limit(inputs["route_length"]))
    try:
        logits, labels = _losses.forward_scored(model, inputs, True)
    finally:
        _state.set_limit(previous)
        for site in sites(model):
            site.relaxation = None
    routes = relaxation.end()
    return _losses.scored_loss(logits, labels), sparsity_ratio(routes), routes


# --- gradients ------------------------------------------------------------------------------------


def test_cross_entropy_alone_reaches_every_router():
    model = stir(tiny(3))
    samples = batch()
    assert min(s.prompt_length for s in samples) > helpers.SINK + helpers.LOCAL
    loss, _, routes = relaxed(model, samples)
    assert 0 < torch.cat(routes, 1).mean() < 1
    loss.mean().backward()
    for site in sites(model):
        for name, parameter in site.named_parameters():
            assert parameter.grad.abs().max() > 1e-9, name


def test_the_constraint_moves_routers_towards_the_target():
    for low, sign in ((1.0, 1), (0.0, -1)):
        model = tiny(2)
        _, ratio, _ = relaxed(model, batch())
        assert 0.2 < ratio.mean() < 0.8, "an untrained router starts neutral"
        multipliers = Multipliers(1)
        ends = torch.full_like(ratio, low)
        multipliers(ratio, ends, ends, torch.zeros(len(ratio), dtype=torch.int64)).sum().backward()
        for site in sites(model):
            full, sparse = site.router[-1].bias.grad.tolist()
            assert sparse * sign < 0 < full * sign


def test_swapping_the_completion_leaves_routes_alone():
    model = stir(tiny(2))
    data = rows()
    swapped = [{**row, "completion": row["completion"][::-1].upper()} for row in data]
    loss, _, routes = relaxed(model, batch(data))
    other, _, same = relaxed(model, batch(swapped))
    assert not torch.equal(loss, other)
    assert all(torch.equal(a, b) for a, b in zip(routes, same, strict=True))
    # And the prompt does matter.
    changed = [{**row, "prompt": row["prompt"][::-1].upper()} for row in data]
    _, _, different = relaxed(model, batch(changed))
    assert any(not torch.equal(a, b) for a, b in zip(routes, different, strict=True))


# --- the run --------------------------------------------------------------------------------------


def test_only_the_routers_change(tmp_path):
    model = plain(2, attention_dropout=0.5)
    model.train()
    model.model.layers[0].mlp.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    cache = model.config.use_cache
    result = run(model, tmp_path / "one", steps=3)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert {n: p.requires_grad for n, p in model.named_parameters() if n in flags} == flags
    assert model.training and model.model.layers[1].self_attn.training
    assert model.config.use_cache == cache
    assert all(site.relaxation is None for site in sites(model))
    assert all(p.grad is None for p in model.parameters())
    assert all(site.router[-1].weight.abs().max() > 0 for site in sites(model))
    # Dropout is off: the backbone is in evaluation mode whatever its state was.
    again = run(plain(2), tmp_path / "two", steps=3)
    assert result.records == again.records


def test_what_a_run_leaves_behind(tmp_path):
    model = tiny()
    out = tmp_path / "router"
    result = run(model, out, steps=3, save_every=2, curves=True)
    names = {path.name for path in out.iterdir()}
    assert {"elastic_config.json", "metrics.jsonl", "fit.json", "curves.png"} <= names
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert kept == ["checkpoint-2", "checkpoint-3"]
    assert not list((out / "checkpoints").rglob("model*.safetensors")), "the backbone is not saved"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines == result.records and [line["step"] for line in lines] == [1, 2, 3]
    first = lines[0]
    assert first["temperature"] == 1.5 and first["lambda_lr"] == 3e-2
    assert first["router_lr"] == pytest.approx(2e-3)  # one of three steps is warm-up
    assert set(first["tasks"]) == {"a", "b"}
    for task, target in (("a", [0.3, 0.3]), ("b", [0.9, 1.0])):
        values = first["tasks"][task]
        assert values["samples"] == 2 and values["target"] == target
        assert 0 <= values["msr"] <= 1 and values["lm_loss"] > 0
        assert 0 <= values["lambda1"] < 0.5 and 0 <= values["lambda2"] < 0.5
        assert lines[-1]["tasks"][task]["lambda1"] > values["lambda1"]
    means = [first["tasks"][t]["lm_loss"] + first["tasks"][t]["penalty"] for t in "ab"]
    assert first["loss"] == pytest.approx(sum(means) / 2, rel=1e-5)
    fresh = elastic_compile.transform(plain(), router=out)
    for one, other in zip(sites(fresh), sites(model), strict=True):
        assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
    text = result.summary()
    assert "0.3" in text and "0.9:1" in text and "Ω_MSR" in text
    with pytest.raises(ValueError, match="holds a fit already: resume it"):
        run(tiny(), out)


@pytest.mark.parametrize("start", ["full", pytest.param("sparse", marks=pytest.mark.long)])
def test_the_target_is_met_from_both_ends(start, tmp_path):
    """B63, the language-model loss held constant: attention says nothing."""
    rng = random.Random(0)
    data = [
        {"prompt": helpers.letters(rng, 14), "completion": "xy", "task": "a"} for _ in range(16)
    ]
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=80,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=10,
            num_key_value_heads=10,
            max_position_embeddings=64,
        )
    )
    base.model.layers[0].self_attn.o_proj.weight.data.zero_()
    elastic_compile.transform(base, helpers.config(sink=2, local=4))
    for target in (0.3, 0.5, 0.8):
        model = copy.deepcopy(base)
        bias = 2.0 if start == "full" else -2.0
        sites(model)[0].router[-1].bias.data.copy_(torch.tensor([bias, -bias]))
        records = run(
            model,
            tmp_path / str(target),
            data,
            targets={"a": target},
            length=24,
            steps=300,
            batch_size=4,
            save_every=300,
        ).records
        ratios = [record["msr"] for record in records]
        began, ended = sum(ratios[:5]) / 5, sum(ratios[-50:]) / 50
        assert began < 0.1 if start == "full" else began > 0.9
        assert ended == pytest.approx(target, abs=0.05)


def close(one, other, tolerance=1e-4):
    """Curves equal up to rounding."""
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a["msr"] == b["msr"], "not the same routes"
        for key in ("loss", "lm_loss", "grad_norm"):
            assert a[key] == pytest.approx(b[key], rel=tolerance), key
        for task in a["tasks"]:
            for key in ("lambda1", "lambda2", "msr", "penalty"):
                assert a["tasks"][task][key] == pytest.approx(b["tasks"][task][key], rel=tolerance)


def test_accumulation_gives_the_same_curve(tmp_path):
    data = [*rows("a", 5), *rows("bc", 2)]
    kw = dict(targets={"a": 0.3, "b": 1, "c": ".2:.4"}, batch_size=4)
    whole = run(stir(tiny()), tmp_path / "whole", data, **kw).records
    # Four samples of three tasks: passes of two see other tasks than the step as a whole.
    parts = run(stir(tiny()), tmp_path / "parts", data, micro_batch=2, **kw).records
    ones = run(stir(tiny()), tmp_path / "ones", data, micro_batch=1, **kw).records
    close(whole, parts)
    close(whole, ones)


def test_checkpointing_gives_the_same_curve(tmp_path):
    model = stir(tiny(3))
    layer = model.model.layers[0]
    before = dict(vars(layer))
    recomputed = []
    attention = model.model.layers[1].self_attn
    handle = attention.register_forward_pre_hook(lambda *a: recomputed.append(1))
    records = run(model, tmp_path / "recomputed", gradient_checkpointing=True).records
    handle.remove()
    assert len(recomputed) == 8, "two forwards in each of four steps"
    assert dict(vars(layer)) == before
    close(records, run(stir(tiny(3)), tmp_path / "plain").records)


def test_checkpointing_that_the_model_has_on_is_kept(tmp_path):
    model = stir(tiny())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    recomputed = []
    model.model.layers[1].self_attn.register_forward_pre_hook(lambda *a: recomputed.append(1))
    records = run(model, tmp_path / "recomputed", steps=2).records
    assert len(recomputed) == 4 and model.model.layers[0].gradient_checkpointing
    close(records, run(stir(tiny()), tmp_path / "plain", steps=2).records)


def test_reentrant_checkpointing_is_refused(tmp_path):
    model = tiny()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="reentrant gradient checkpointing"):
        run(model, tmp_path / "out")


def test_recomputation_sees_the_prompt_lengths_in_whatever_thread_it_runs():
    """Autograd recomputes on a device thread, where thread-local state is another."""
    lengths = torch.tensor([3, 4])
    site = _state.rewritten_sites(tiny())[0][1]
    previous = _state.set_limit(_state.Limit(lengths))
    try:
        _, context = trainer_._recompute_contexts()
    finally:
        _state.set_limit(previous)
    seen = []

    def recompute():
        seen.append(_state.route_length(site))
        with context:
            seen.append(_state.route_length(site))
        seen.append(_state.route_length(site))

    thread = threading.Thread(target=recompute)
    thread.start()
    thread.join()
    assert seen[0] is None and seen[1] is lengths and seen[2] is None


def test_recipes_and_presets():
    assert PRESETS["quick"].settings == FitSettings()
    assert (FitSettings().router_lr, FitSettings().lambda_lr) == (2e-3, 3e-2)
    paper = choose("paper", "paper")
    assert (paper.length, paper.batch_size, paper.steps) == (65536, 48, 300)
    assert (paper.router_lr, paper.lambda_lr, paper.weight_decay) == (5e-4, 1e-3, 0.1)
    assert (paper.constraint, paper.temperature) == ("signed", "exponential")
    assert paper.annealing().at(1.0) == pytest.approx(1.5 * 0.5488, abs=1e-3)
    released = choose("paper", "released")
    assert (released.constraint, released.temperature) == ("distance", "cosine")
    assert (released.temperature_start, released.temperature_end) == (1.5, 1.0)
    assert choose(steps=7, router_lr=None).steps == 7
    with pytest.raises(ValueError, match="the preset is 'fast'; allowed: 'quick', 'paper'"):
        choose("fast")
    with pytest.raises(ValueError, match="the recipe is 'x'"):
        choose(recipe="x")
    with pytest.raises(TypeError, match="unknown setting step"):
        choose(step=3)


def test_learning_rate_warms_up_and_falls():
    settings = FitSettings(steps=10, warmup=0.2)
    rates = [settings.router_rate(step) for step in range(10)]
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert rates[6] == pytest.approx(0.5) and rates[9] == pytest.approx(0.0381, abs=1e-3)
    assert FitSettings(steps=4, warmup=0.0).router_rate(0) == 1.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"steps": 0}, "steps is 0; allowed: a whole number from 1"),
        ({"router_lr": float("nan")}, "router_lr is nan"),
        ({"beta2": 1.0}, "beta2 is 1.0"),
        ({"constraint": "hinge"}, "constraint is 'hinge'"),
        ({"temperature": "linear"}, "temperature is 'linear'"),
        ({"temperature_end": 2.0}, "0 < end <= start"),
    ],
)
def test_bad_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        FitSettings(**fields)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": {"a": 0.3}}, "no target for the task 'b': give --target b=T"),
        ({"targets": {"a": 0.3, "b": 1, "c": 1}}, "given for c"),
        ({"length": 11}, "raise --length"),
        ({"batch_size": 4, "micro_batch": 3}, "does not divide evenly"),
        ({"training_args": {"max_steps": 3}}, "max_steps cannot be set through training arguments"),
        ({"training_args": {"gradient_checkpointing": True}}, "fit's own settings"),
    ],
)
def test_bad_runs_leave_nothing(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        run(tiny(), tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_samples_that_teach_nothing_are_refused(tmp_path):
    data = [{"prompt": "abcdef", "completion": "gh", "task": "a"}]
    with pytest.raises(ValueError, match=r"length is 12, sink \+ local is 12: .* nothing to learn"):
        run(tiny(), tmp_path / "out", data, targets={"a": 1}, length=12)


def test_another_configuration_is_refused(tmp_path):
    model = tiny()
    with pytest.raises(ValueError, match="another configuration than asked for: local differ"):
        helpers.fit(
            model,
            tokenizer(),
            data=rows(),
            out=tmp_path / "out",
            config=helpers.config(local=9),
            targets={"a": 1, "b": 1},
            length=LENGTH,
        )


def test_no_plot_without_matplotlib(tmp_path, monkeypatch, caplog):
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with caplog.at_level(logging.WARNING, logger="elastic_compile"):
        run(tiny(), tmp_path / "out", steps=1, curves=True)
    assert "matplotlib is not installed" in caplog.text
    assert not (tmp_path / "out" / "curves.png").exists()
    assert (tmp_path / "out" / "elastic_config.json").exists()


@pytest.mark.parametrize("save_every", [1, 100])
def test_a_loss_that_is_no_number_stops_the_run(tmp_path, save_every):
    model = tiny()
    poison = tokenizer()("Q")["input_ids"][0]
    model.get_input_embeddings().weight.data[poison] = float("nan")
    data = [*rows("a", 3), {"prompt": "Q" * 40, "completion": "abc", "task": "a"}]
    with pytest.raises(TrainingDiverged) as raised:
        run(model, tmp_path, data, targets={"a": 0.5}, steps=4, batch_size=1, save_every=save_every)
    records = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    step = len(records) + 1
    assert step > 1 or save_every > 1
    assert f"the loss is nan in step {step}" in str(raised.value)
    if save_every == 1:
        last = tmp_path / "checkpoints" / f"checkpoint-{step - 1}"
        assert f"the routers of step {step - 1} are in {last}" in str(raised.value)
        fresh = elastic_compile.transform(plain(), helpers.config())
        elastic_compile.load_router(fresh, last)
        assert all(p.isfinite().all() for s in sites(fresh) for p in s.parameters())
    else:
        assert "no checkpoint had been written yet" in str(raised.value)
    assert not (tmp_path / "elastic_config.json").exists()
    assert all(site.relaxation is None for site in sites(model))


# --- resuming -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model and its tokenizer in a folder, and rows in a file."""
    folder = tmp_path_factory.mktemp("model")
    plain(2).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return folder


def command(saved, out, *more):
    return [
        *("--model", str(saved), "--data", str(saved / "rows.jsonl"), "--out", str(out)),
        *("--target", "a=.3", "b=.9:1", "--length", str(LENGTH), "--batch-size", "4"),
        *("--sink", "4", "--local", "8", "--device", "cpu", *more),
    ]


def test_a_killed_run_goes_on_as_if_nothing_had_happened(saved, tmp_path):
    steps = ("--steps", "12", "--save-every", "4")
    from elastic_compile.fit import main

    assert main(command(saved, tmp_path / "whole", *steps, "--quiet")) == 0
    whole = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    out = tmp_path / "killed"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "elastic_compile.fit", *command(saved, out, *steps, "--quiet")],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 6):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = metrics.read_bytes().count(b"\n")
    assert 6 <= done < 12 and not (out / "elastic_config.json").exists()
    # What an interrupted save and an interrupted line leave behind.
    last = trainer_.last_checkpoint(out / "checkpoints")
    half = shutil.copytree(last, out / "checkpoints" / "checkpoint-11")
    (half / trainer_.COMPLETE).unlink()
    (half / "optimizer.pt").write_bytes(b"")
    with metrics.open("ab") as file:
        file.write(b'{"step": 9')
    assert main(command(saved, out, *steps, "--quiet", "--resume")) == 0
    assert metrics.read_bytes() == whole
    assert not half.exists()
    for name in ("elastic_config.json",):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # Once more: there is nothing left to do.
    assert main(command(saved, out, *steps, "--quiet", "--resume")) == 0
    assert metrics.read_bytes() == whole


def test_two_processes_train_as_one(saved, tmp_path):
    """A step's three tasks fall to the processes unevenly; sums and means are those of the step."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows("abc")))
    arguments = [
        *("--model", str(saved), "--data", str(tmp_path / "rows.jsonl"), "--length", str(LENGTH)),
        *("--target", "a=.3", "b=.9:1", "c=.5", "--batch-size", "4", "--steps", "3", "--quiet"),
        *("--sink", "4", "--local", "8", "--device", "cpu"),
    ]
    from elastic_compile.fit import main

    assert main([*arguments, "--out", str(tmp_path / "one")]) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    start = [sys.executable, "-m", "elastic_compile.fit", *arguments]
    processes = [
        subprocess.Popen(
            [*start, "--out", str(tmp_path / "two")],
            env={
                **os.environ,
                **together,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert ["s a step" in output for output in outputs] == [True, False]
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [record["tasks"]["a"]["samples"] for record in one] == [2, 1, 1]
    close(one, two)


@pytest.mark.parametrize("callers", [False, True])
def test_the_command_ends_the_process_group_it_began(saved, tmp_path, monkeypatch, callers):
    """After an error too; a caller's own group is the caller's."""
    import torch.distributed as dist

    import elastic_compile.training
    from elastic_compile.fit import main

    def begin():
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)

    def stops(*args, **kwargs):
        if not callers:
            begin()
        raise ValueError("stopped")

    monkeypatch.setattr(elastic_compile.training, "fit", stops)
    if callers:
        begin()
    try:
        assert main(command(saved, tmp_path / "out")) == 1
        assert dist.is_initialized() == callers
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_run_is_resumed_with_its_own_settings(tmp_path):
    run(tiny(), tmp_path / "out", steps=2)
    with pytest.raises(ValueError, match=r"another fit: settings \(steps: 2 there, 3 now\)"):
        run(tiny(), tmp_path / "out", steps=3, resume=True)
    with pytest.raises(ValueError, match="targets"):
        run(tiny(), tmp_path / "out", steps=2, resume=True, targets={"a": 0.5, "b": 1})
    # Without a checkpoint a run starts again.
    shutil.rmtree(tmp_path / "out" / "checkpoints")
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    run(tiny(), tmp_path / "out", steps=2, resume=True)
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == before


# --- command lines --------------------------------------------------------------------------------


def test_commands(saved, tmp_path, capsys):
    from elastic_compile.evaluate import main as evaluate_main
    from elastic_compile.fit import main as fit_main

    out = tmp_path / "router"
    assert fit_main(command(saved, out, "--steps", "2")) == 0
    printed = capsys.readouterr()
    assert "s a step" in printed.out and "0.9:1" in printed.out and "fit:" in printed.err
    model = [*("--model", str(saved), "--data", str(saved / "rows.jsonl"), "--device", "cpu")]
    results = tmp_path / "evaluation.json"
    status = evaluate_main(
        [*model, "--router", str(out), "--samples", "3", "--out", str(results), "--quiet"]
    )
    assert status == 0
    document = json.loads(results.read_text())
    assert set(document["tasks"]) == {"a", "b"}
    assert document["tasks"]["a"]["samples"] == 3
    assert "routed EM" in capsys.readouterr().out
    # From a router folder on; and errors end with status 1 and one line.
    more = tmp_path / "more"
    again = [*command(saved, more, "--steps", "1", "--quiet"), "--router", str(out)]
    again += ["--save-dtype", "bfloat16"]
    assert fit_main(again) == 1
    assert "leave --sink and --local out" in capsys.readouterr().err
    del again[again.index("--sink") : again.index("--sink") + 4]
    assert fit_main(again) == 0
    (weights,) = more.glob("router-*.safetensors")
    assert {t.dtype for t in load_file(weights).values()} == {torch.bfloat16}
    assert fit_main([*command(saved, out, "--steps", "2"), "--target", "a=2"]) == 1
    assert "error: --target gives the task 'a' twice" in capsys.readouterr().err
    assert fit_main([*model, "--out", str(tmp_path / "x"), "--sink", "4", "--local", "8"]) == 1
    assert "error: no target for the task 'a', 'b'" in capsys.readouterr().err


def test_a_fitted_model_routes_as_it_was_evaluated(tmp_path):
    model = tiny()
    run(model, tmp_path / "out", steps=2)
    sources = load_sources(rows(), Encoder(tokenizer(), LENGTH))
    one = evaluate(model, sources, samples=4, progress=False)
    fresh = elastic_compile.transform(plain(), router=tmp_path / "out")
    other = evaluate(fresh, sources, samples=4, progress=False)
    for task in one.tasks:
        mine, theirs = one.tasks[task], other.tasks[task]
        assert (mine.msr, mine.sparse_share) == (theirs.msr, theirs.sparse_share)
        for mode in one.modes:  # another implementation: a router's kernel is not saved
            assert mine.nll[mode] == pytest.approx(theirs.nll[mode], abs=1e-4)


def test_a_process_takes_its_own_gpu(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fit_command.own_device() == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert fit_command.own_device() == "cuda:3"
    monkeypatch.delenv("LOCAL_RANK")
    assert fit_command.own_device() == "cuda"
