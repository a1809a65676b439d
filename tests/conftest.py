"Few threads, markers that skip what this machine cannot do, and the shared data folder."
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")       # before torch is imported: exactness needs a fixed number of threads
os.environ.setdefault("MPLBACKEND", "agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")        # a test that needs a hub is a bug
import signal
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
