"test_gpu.py on the simulated device: the tests for real accelerators do run, and what they ask for is kept there."

import pytest
import torch
from test_gpu import *  # noqa: F403

pytest_plugins = ["simdev.plugin"]
pytestmark = []  # not `gpu`


@pytest.fixture
def device(sim):
    "Instead of the real one: everything late by up to 0.1 ms."
    sim.configure(delay=0.0001)
    return torch.accelerator.current_accelerator()
