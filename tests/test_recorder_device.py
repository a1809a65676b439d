"""Recording on the simulated accelerator: copies are only queued, and the trace is that of the CPU all the same; no hazard."""

import numpy as np
import pytest
import torch
from test_device import decode, offloaded, prompt, resident, same

from expertflow.recorder import record
from expertflow.testing import write_checkpoint
from expertflow.trace import load_trace, verify

pytest_plugins = ["simdev.plugin"]


@pytest.mark.parametrize("budget", ["25%", "100%"])
@pytest.mark.parametrize("hidden", [False, True, "residual"])
def test_the_trace_of_the_cpu(sim, tmp_path, hidden, budget):
    path = write_checkpoint("olmoe", tmp_path / "m", dtype="float32")
    ids = prompt(320)
    model = resident(path)
    with record(model, tmp_path / "cpu", hidden):
        want = decode(model, ids, 12)
    sim.configure(delay=0.0002, seed=1)
    with offloaded(path, budget) as flow:
        with record(flow, tmp_path / "sim", hidden):
            got = decode(flow.model, ids.to("sim"), 12)
        assert same(got, want) and not sim.hazards()
    verify(tmp_path / "sim")
    a, b = load_trace(tmp_path / "cpu"), load_trace(tmp_path / "sim")
    for name in ("ids", "weights", "tokens", "flags", "step", "sequence", *(["hidden"] if hidden else [])):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert len(b) == 33 + 11 and torch.get_num_threads() == 1
