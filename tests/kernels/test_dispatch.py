"""Which implementation runs, what is counted, and what importing the ops brings in."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from elastic_compile.kernels import _dispatch, ops
from elastic_compile.kernels._call import AttentionCall
from tests.kernels import cases
from tests.kernels.cases import alternating, inputs

LONG = {"sink": 4, "local": 24}
WIDE = {"sink": 4, "local": 96}
BLOCKS = {"sink": 4, "local": 24, "sparse_mode": "blocks"}


@pytest.fixture
def tensors():
    return inputs(1, 4, 2, 100, 100)


@pytest.fixture
def registry(monkeypatch):
    """A registry that tests may add to."""
    monkeypatch.setattr(_dispatch, "_registry", dict(_dispatch._registry))
    return _dispatch._registry


def run(tensors, **options):
    return ops.attention(*tensors, alternating(1, 2), **LONG | options)[0]


def test_auto_takes_the_cpu_kernel(tensors, counts):
    run(tensors)
    assert counts() == {"calls": {"cpu": 1}, "backward": {}, "fallbacks": {}}


def test_keys_within_sink_and_local_take_the_dense_path(tensors, counts):
    run(tensors, **WIDE)
    run(tensors, sparse_mode="full")
    run(tensors, local=95)
    assert counts()["calls"] == {"dense": 2, "cpu": 1}
    assert counts()["fallbacks"] == {}


def test_declined_calls_go_to_the_reference_with_the_reason(tensors, counts):
    run(tensors, **BLOCKS, **cases.block_lists(1, 2, 100))
    assert counts()["calls"] == {"reference": 1}
    assert counts()["fallbacks"] == {"cpu: block lists are not supported": 1}


def test_the_backward_is_counted_apart(tensors, counts):
    leaves = [tensor.requires_grad_() for tensor in tensors]
    run(leaves).sum().backward()
    run(leaves, **WIDE).sum().backward()
    run(leaves, kernel="reference").sum().backward()
    assert counts()["calls"] == counts()["backward"] == {"cpu": 1, "dense": 1, "reference": 1}


def test_a_named_kernel_runs(tensors, counts):
    for name in ("cpu", "reference"):
        run(tensors, kernel=name, **WIDE)
    run(tensors, kernel="dense", **WIDE)
    assert counts()["calls"] == {"cpu": 1, "reference": 1, "dense": 1}


def test_a_named_kernel_never_falls_back(tensors, counts):
    with pytest.raises(ValueError, match="kernel='cpu' cannot serve this call: block lists"):
        run(tensors, kernel="cpu", **BLOCKS, **cases.block_lists(1, 2, 100))
    with pytest.raises(ValueError, match="kernel='dense' cannot serve this call: routes differ"):
        run(tensors, kernel="dense")
    assert counts()["calls"] == {}


def test_an_unknown_kernel_lists_the_known_ones(tensors):
    with pytest.raises(ValueError, match="'fast' is no implementation; known: auto, .*reference"):
        run(tensors, kernel="fast")


def test_the_environment_overrides_auto_only(tensors, counts, monkeypatch):
    monkeypatch.setenv("ELASTIC_COMPILE_KERNEL", "reference")
    run(tensors)
    run(tensors, kernel="cpu")
    assert counts()["calls"] == {"reference": 1, "cpu": 1}
    monkeypatch.setenv("ELASTIC_COMPILE_KERNEL", "auto")
    run(tensors)
    assert counts()["calls"] == {"reference": 1, "cpu": 2}
    monkeypatch.setenv("ELASTIC_COMPILE_KERNEL", "dense")
    with pytest.raises(ValueError, match="ELASTIC_COMPILE_KERNEL='dense' cannot serve"):
        run(tensors)


def test_registration_order_is_priority(tensors, counts, registry, monkeypatch):
    served = []
    fake = SimpleNamespace(
        supports=lambda call: (call.query.shape[2] > 50, "50 queries or fewer"),
        forward=lambda call: (served.append(call), _dispatch._registry["cpu"].load().forward(call))[
            1
        ],
    )
    monkeypatch.setitem(sys.modules, "tests_fake_kernel", fake)
    rest = dict(registry)
    registry.clear()
    _dispatch.register("fake", "tests_fake_kernel", devices=("cpu",), differentiable=False)
    registry.update(rest)
    assert _dispatch.implementations() == ("fake", *rest)

    leaves = [tensor.requires_grad_() for tensor in tensors]
    run(leaves).sum().backward()
    run([leaves[0][:, :, :50], *leaves[1:]])
    assert len(served) == 1
    assert counts()["calls"] == {"fake": 1, "cpu": 1}
    assert counts()["backward"] == {"cpu": 1}
    assert counts()["fallbacks"] == {"fake: 50 queries or fewer": 1}

    out = run(leaves, kernel="fake")
    with pytest.raises(
        ValueError, match="kernel='fake' cannot serve this call: it has no backward"
    ):
        out.sum().backward()
    with pytest.raises(ValueError, match="already registered"):
        _dispatch.register("fake", "elsewhere")


def test_results_are_made_what_the_fake_promises(tensors, registry, monkeypatch):
    cpu = registry["cpu"].load()

    def transposed(*results):
        return tuple(result.mT.contiguous().mT for result in results)

    fake = SimpleNamespace(
        supports=lambda call: (True, ""),
        forward=lambda call: transposed(*cpu.forward(call)),
        backward=lambda *args: (*transposed(*cpu.backward(*args)[:3]), None),
    )
    monkeypatch.setitem(sys.modules, "tests_fake_kernel", fake)
    _dispatch.register("fake", "tests_fake_kernel")
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out, lse = ops.attention(*leaves, alternating(1, 2), kernel="fake", **LONG)
    assert out.transpose(1, 2).is_contiguous() and lse.is_contiguous()
    assert all(grad.is_contiguous() for grad in torch.autograd.grad(out.sum(), leaves))


def test_other_devices_are_neither_imported_nor_fallbacks(tensors, counts, registry):
    rest = dict(registry)
    registry.clear()
    _dispatch.register("gpu", "no.such.module", devices=("cuda",))
    registry.update(rest)
    run(tensors)
    assert counts() == {"calls": {"cpu": 1}, "backward": {}, "fallbacks": {}}
    with pytest.raises(
        ValueError, match="kernel='gpu' .* runs on cuda only, the inputs are on cpu"
    ):
        run(tensors, kernel="gpu")


def test_counters_are_exact_under_threads(tensors, counts):
    small = [tensor[:, :, :3] for tensor in tensors]
    threads = [threading.Thread(target=lambda: [run(small) for _ in range(25)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts()["calls"] == {"dense": 100}


def test_a_snapshot_is_a_copy(tensors, counts):
    before = counts()
    run(tensors)
    before["calls"]["cpu"] = 99
    assert counts()["calls"] == {"cpu": 1}


def test_importing_and_running_needs_no_triton():
    program = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ImportError("triton was asked for")

sys.meta_path.insert(0, Refuse())
import torch
from elastic_compile.kernels import ops
heads = torch.randn(1, 2, 9, 8, requires_grad=True)
out, _ = ops.attention(heads, heads, heads, torch.ones(1, 2, dtype=torch.int32), sink=1, local=2)
out.sum().backward()
assert "triton" not in sys.modules
loaded = {name.split(".")[0] for name in sys.modules}
assert not {"transformers", "optimum", "onnx"} & loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, ""),
        ({"scale": -0.5}, ""),
        ({"local": 8}, "routes differ"),
        ({"start": torch.tensor([3])}, "start is not supported"),
        ({"kv_len": torch.tensor(80)}, "kv_len is not supported"),
        ({"key_mask": torch.ones(1, 90, dtype=torch.bool)}, "key_mask is not supported"),
        ({"softcap": 2.0, "sinks": torch.zeros(4)}, "softcap, sinks is not supported"),
        ({"scale_tensor": torch.tensor(0.1)}, "scale_tensor is not supported"),
        ({"dropout_p": 0.1, "dropout_seed": torch.tensor(1)}, "dropout_p is not supported"),
        ({"rows": 40}, "queries that follow cached keys"),
        ({"rows": 1}, ""),
        ({"size": 20}, "head sizes"),
        ({"value_size": 16}, "head sizes"),
    ],
    ids=str,
)
def test_what_sdpa_on_a_gpu_takes(options, reason):
    """By the arguments alone; tests/gpu has what it computes."""
    from elastic_compile.kernels import sdpa_cuda

    options = {"sink": 4, "local": 100, "rows": 90, "size": 32, "value_size": None} | options
    rows, size, value_size = (options.pop(name) for name in ("rows", "size", "value_size"))
    query = torch.randn(1, 4, rows, size)
    key, value = torch.randn(1, 2, 90, size), torch.randn(1, 2, 90, value_size or size)
    call = AttentionCall(query, key, value, alternating(1, 2), **options)
    ok, said = sdpa_cuda.supports(call)
    assert (ok, said) == (True, "") if not reason else (not ok and reason in said)
