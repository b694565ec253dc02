"""Tensor parallelism: two processes over gloo, the model sharded by transformers' own plan.

The processes run only when asked for: ``pytest -m long tests/integration``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import elastic_compile
from tests.families import build
from tests.integration.helpers import elastic_config, random_routers

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import sys
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
import elastic_compile
from tests.integration.helpers import elastic_config, error, logits, prompts, routes_of

folder = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
single = AutoModelForCausalLM.from_pretrained(folder).eval()
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
ids, mask = prompts(side="left")
before = logits(model, ids, mask)
elastic_compile.transform(model, router=folder + "/router")
elastic_compile.transform(single, router=folder + "/router")
(heads,) = {site.kv_heads for site in elastic_compile.report(model).rewritten}
assert heads == 1 and len(elastic_compile.report(model).rewritten) == 2
with elastic_compile.force_routes(model, "full"):
    assert error(logits(model, ids, mask), before, mask) <= 2e-5
actual, expected = logits(model, ids, mask), logits(single, ids, mask)
routes, whole = routes_of(model), routes_of(single)
assert torch.equal(routes, whole[..., rank : rank + 1]), (routes, whole)
assert 0 < whole.float().mean() < 1
assert error(actual, expected, mask) <= 2e-5
assert error(actual, before, mask) > 1e-3
new = dict(max_new_tokens=5, do_sample=False, attention_mask=mask)
assert torch.equal(model.generate(ids, **new), single.generate(ids, **new))
elastic_compile.restore(model)
assert torch.equal(logits(model, ids, mask), before)
dist.destroy_process_group()
print("rank", rank, "agrees")
"""


@pytest.mark.long
def test_two_processes_route_their_own_heads(tmp_path):
    model = elastic_compile.transform(build("llama"), elastic_config())
    with random_routers(model, seed=3):
        model.save_pretrained(tmp_path)
        elastic_compile.save_router(model, tmp_path / "router")
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(port), str(script), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") == 2


def test_the_geometry_of_a_shard_is_that_of_the_whole(tmp_path):
    """A router folder names the model's heads, not those of one process."""
    model = elastic_compile.transform(build("llama"), elastic_config())
    elastic_compile.save_router(model, tmp_path)
    sites = [m for m in model.modules() if hasattr(m, "elastic_router")]
    for module in sites:
        module.elastic_router.kv_heads, module.elastic_router.shards = 1, 2
    elastic_compile.load_router(model, tmp_path)
    for module in sites:
        module.elastic_router.shards = 1
    with pytest.raises(ValueError, match="2 kv heads"):
        elastic_compile.load_router(model, tmp_path)
