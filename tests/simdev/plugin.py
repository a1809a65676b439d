"""Every test that takes the fixture `sim` runs in a process of its own: a fork of pytest's, in which the device is started.

Starting the device makes it torch's accelerator for the rest of a process, which other tests must not see; and a test that
crashes the process takes nothing else with it. A test module asks for this with `pytest_plugins = ["simdev.plugin"]`.
Fixtures of such a test are set up in its process, whatever their scope.
"""
import os
import pickle
import resource
import select
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _pytest.runner import runtestprotocol

import simdev

GRACE = 30.0    # s, for a test that pytest-timeout could not stop because it hangs below Python


@pytest.fixture
def sim() -> Iterator[Any]:
    "The simulated device, reset; the test must not leave a hazard or an error that it has not looked at."
    ok, why = simdev.available()
    if not ok: pytest.skip(why)
    simdev.reset()
    yield simdev
    error = simdev.unseen_error()
    left = simdev.hazards()
    assert not error, f"an asynchronous error that the test did not wait for: {error}"
    assert not left, "hazards:\n" + "\n".join(map(str, left))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if "sim" not in getattr(item, "fixturenames", ()): return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in forked(item): item.ihook.pytest_runtest_logreport(report=report)
    item.session._setupstate.teardown_exact(nextitem)   # of what the test before has left for this one
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def forked(item: pytest.Item) -> list[pytest.TestReport]:
    "The reports of a test that runs in a child."
    hook, config = item.config.hook, item.config
    item.session.config._tmp_path_factory.getbasetemp()     # one for all children
    torch.empty(1, device="meta") + 1       # imports much that the device needs, for all children
    left = signal.setitimer(signal.ITIMER_REAL, 0)[0]       # of pytest-timeout, which then watches over the child
    read, write = os.pipe()
    if not (pid := os.fork()):
        try:
            os.close(read)
            signal.setitimer(signal.ITIMER_REAL, left)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))    # the device has many addresses, and all would be written
            reports = [hook.pytest_report_to_serializable(config=config, report=r) for r in runtestprotocol(item, log=False)]
            with open(write, "wb") as f: f.write(pickle.dumps(reports))
        finally: os._exit(0)
    os.close(write)
    data, status = receive(read, left + GRACE if left else None), None
    if data is None: os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if data: return [hook.pytest_report_from_serializable(config=config, data=d) for d in pickle.loads(data)]
    why = "hung" if data is None else f"was ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended early"
    return [pytest.TestReport(item.nodeid, item.location, {}, "failed", f"the test's process {why}", "call")]


def receive(fd: int, timeout: float | None) -> bytes | None:
    "All that comes out of a pipe until its end; None if nothing comes for too long."
    parts = []
    with open(fd, "rb", buffering=0) as f:
        while True:
            if not select.select([f], [], [], timeout)[0]: return None
            if not (part := f.read(1 << 16)): return b"".join(parts)
            parts.append(part)
