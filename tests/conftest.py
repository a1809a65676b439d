"Few threads, markers that skip what this machine cannot do, and the shared data folder."
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")       # before torch is imported: exactness needs a fixed number of threads
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")        # a test that needs a hub is a bug
import inspect
import signal
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    try:
        import torch
    except ImportError: return
    torch.set_num_threads(1)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:       # of a shell's background job; some tests press Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [i for i in items if i.get_closest_marker("gpu")]
    if not gpu: return
    try:
        import torch
        if torch.accelerator.is_available(): return
    except ImportError: pass
    for item in gpu: item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))


@pytest.fixture(scope="session")
def repo() -> Path:
    "The root of the repository."
    return REPO


@pytest.fixture(scope="session")
def shared() -> Path:
    "The data folder that lies beside the repository on some machines."
    folder = Path(os.environ.get("EXPERTFLOW_SHARED") or REPO.parent / "shared")
    if not folder.is_dir(): pytest.skip("no shared data folder (set EXPERTFLOW_SHARED)")
    return folder


@cache
def told_which(family: str) -> bool:
    """Whether the experts of a toy family are told which of them to run, in the transformers that is installed. Older ones have
    families whose experts choose for themselves. Asks transformers alone: if ExpertFlow overlooked experts, tests should fail.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from expertflow.testing import family_config
    with torch.device("meta"): model = AutoModelForCausalLM.from_config(family_config(family))
    experts = [m for n, m in model.named_modules() if n.endswith("experts")]
    return any(len(inspect.signature(m.forward).parameters) >= 3 for m in experts)     # tokens, choice, weights


@pytest.fixture(scope="session")
def left_out() -> list[str]:
    "The toy families that tests skip here."
    from expertflow.testing import FAMILIES
    return [f for f in FAMILIES if not told_which(f)]


@pytest.fixture(autouse=True)
def _family_is_pageable(request: pytest.FixtureRequest) -> None:
    "Tests of a toy family are skipped where its experts choose for themselves."
    family = getattr(request.node, "callspec", None) and request.node.callspec.params.get("family")
    if not family: return
    from transformers import __version__

    from expertflow.testing import FAMILIES
    if family in FAMILIES and not told_which(family):
        pytest.skip(f"the experts of {family} choose for themselves in transformers {__version__}")
