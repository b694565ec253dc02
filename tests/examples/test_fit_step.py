"""The row of fit_step.py on a tiny model on the CPU."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

import fit_step
import model_prefill

import elastic_compile


@pytest.mark.long
def test_a_row_is_a_fit_of_that_length():
    device = model_prefill.Device("cpu")
    model = model_prefill.build("tiny", 2304, device)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    row = fit_step.measure(model, "tiny", 2304, 1, device)
    assert row["geometry"] == "tiny" and row["S"] == 2304
    assert row["step_s"] > 0 and 0 <= row["msr"] <= 1
    # The next length begins with the untouched model.
    assert not elastic_compile.is_transformed(model) and before.keys() == model.state_dict().keys()
    assert all((before[name] == tensor).all() for name, tensor in model.state_dict().items())
