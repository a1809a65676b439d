"The simulated accelerator does what it promises: asynchronous, bounded, protected; and no missing wait escapes it."
import ctypes
import faulthandler
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import simdev
import torch

pytest_plugins = ["simdev.plugin"]
MB = 1 << 20


def on_device(*shape, **kw): return torch.randn(*shape, generator=torch.Generator().manual_seed(0), **kw).to("sim")


def pinned(n, fill=1.0): return torch.full((n,), fill).pin_memory()


def kinds(sim):
    "Of the hazards so far; the device is idle afterwards."
    torch.accelerator.synchronize()
    return {h.kind for h in sim.hazards()}


def needs_device():
    ok, why = simdev.available()
    if not ok: pytest.skip(why)


def in_fork(f, tmp_path):
    "Runs `f` in a child in which the device is started and may crash it: how it ended, and what it printed."
    needs_device()
    out = tmp_path / "out"
    if not (pid := os.fork()):
        fd = os.open(out, os.O_CREAT | os.O_WRONLY)
        os.dup2(fd, 1), os.dup2(fd, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()      # pytest's would tell everybody
        code = 1
        try:
            simdev.load()
            f()
            code = 0
        except BaseException as e: os.write(2, f"{type(e).__name__}: {e}\n".encode())
        finally: os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), out.read_text()


# the generic interface

def test_it_is_the_accelerator(sim):
    acc = torch.accelerator
    assert acc.is_available() and acc.current_accelerator() == torch.device("sim") and acc.device_count() == 1
    assert acc.current_stream() == torch.accelerator.current_stream() != torch.Stream("sim")
    s = torch.Stream("sim")
    with s: assert acc.current_stream() == s
    assert acc.current_stream() != s


def test_ops_are_those_of_the_cpu(sim):
    a, b = torch.randn(33, 65), torch.randn(65, 17)
    x, y = a.to("sim"), b.to("sim")
    for f in (
        lambda a, b: a @ b,
        lambda a, b: torch.nn.functional.silu(a).softmax(-1) @ b,
        lambda a, b: a.bfloat16() @ b.bfloat16(),
        lambda a, b: torch.einsum("ij,jk->ki", a, b),
        lambda a, b: torch.cat([a, b.t()]),
        lambda a, b: a.topk(3)[1],
        lambda a, b: a.sort(-1)[0][:, ::2].cumsum(0),
        lambda a, b: a.unfold(0, 3, 2),
        lambda a, b: a[a > 0],
        lambda a, b: a.nonzero(),
        lambda a, b: a[[3, 1]],
        lambda a, b: a.clone().index_add_(0, torch.tensor([1, 1], device=a.device), b.t()[:2]),
    ):
        assert torch.equal(f(x, y).cpu(), f(a, b))
    assert torch.histc(torch.arange(9, device="sim", dtype=torch.int32), 4, 0, 8).tolist() == [2, 2, 2, 3]    # as in CUDA
    torch.manual_seed(1)
    z = torch.rand(9, device="sim").multinomial(3)
    torch.manual_seed(1)
    assert torch.equal(z.cpu(), torch.rand(9).multinomial(3))


def test_errors_of_the_caller_are_raised_at_the_call(sim):
    x = on_device(4, 5)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"): x @ x
    with pytest.raises(RuntimeError, match="same device"): x + torch.ones(4, 5)
    with pytest.raises(RuntimeError, match="must match"): x.add_(on_device(3, 3))


def test_own_ops(sim):
    lib = torch.library.Library("simtest", "DEF")
    lib.define("twice(Tensor x) -> Tensor")
    lib.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
    lib.define("thrice(Tensor x) -> Tensor")
    lib.impl("thrice", lambda x: x + x + x, "PrivateUse1")

    @torch.library.custom_op("simtest::negative", mutates_args=())     # a CPU kernel in Python, which the worker runs
    def negative(x: torch.Tensor) -> torch.Tensor: return -x

    @negative.register_fake
    def _(x: torch.Tensor) -> torch.Tensor: return torch.empty_like(x)

    x = on_device(5)
    assert torch.equal(torch.ops.simtest.twice(x).cpu(), x.cpu() * 2)
    assert torch.equal(torch.ops.simtest.thrice(x).cpu(), x.cpu() + x.cpu() + x.cpu())
    assert torch.equal(negative(x).cpu(), -x.cpu())


# asynchronous

def test_ops_and_pinned_copies_do_not_hold_the_host(sim):
    source = pinned(MB // 2)        # 2 MB
    side, x = torch.Stream("sim"), torch.ones(3, device="sim")
    torch.accelerator.synchronize()
    sim.configure(link=4 * MB, op_time=0.5)
    start = time.perf_counter()
    with side: y = source.to("sim", non_blocking=True)
    z = x + 1
    done = side.record_event()
    assert not done.query()
    assert time.perf_counter() - start < 0.4
    done.synchronize()
    assert time.perf_counter() - start >= 0.5
    assert torch.equal(y.cpu(), source) and z.cpu().tolist() == [2, 2, 2]
    copy = next(s for s in sim.trace() if s.kind == "h2d" and s.stream > 0)
    op = next(s for s in sim.trace() if s.name == "aten::add")
    assert copy.start < op.end and op.start < copy.end, "the copy and the op ran one after the other"


def test_pageable_copies_hold_the_host(sim):
    sim.configure(link=10 * MB)
    for source, kind in ((torch.ones(MB // 4), "pageable"), (pinned(MB // 4), "pinned")):
        start = time.perf_counter()
        y = source.to("sim", non_blocking=True)
        assert (time.perf_counter() - start >= 0.1) == (kind == "pageable")
        out = torch.empty(MB // 4, pin_memory=kind == "pinned")
        out.copy_(y, non_blocking=True)
        torch.accelerator.synchronize()
        assert torch.equal(out, source)
    c = sim.counters()
    assert [c[f"copies.{way}.{kind}"] for way in ("h2d", "d2h") for kind in ("pinned", "pageable")] == [1, 1, 1, 1]
    assert c["bytes.h2d.pinned"] == c["bytes.d2h.pageable"] == MB
    assert c["sync.copy"] == 2 and c["sync.device"] == 2


def test_link_has_a_rate_in_each_direction_and_a_latency(sim):
    sim.configure(link=(20 * MB, 5 * MB), latency=0.05)
    h = pinned(MB // 4)
    d = h.to("sim", non_blocking=True)
    h.copy_(d, non_blocking=True)
    torch.accelerator.synchronize()
    took = {s.kind: s.end - s.start for s in sim.trace()}
    assert 0.1 <= took["h2d"] < 0.25 <= took["d2h"] < 1


def test_conversion_makes_a_copy_pageable(sim):
    "As in CUDA: the host converts into memory that is not pinned."
    h = torch.ones(8, 8, dtype=torch.float64).pin_memory()
    torch.empty(8, 8, device="sim").copy_(h, non_blocking=True)
    torch.empty(8, 8, device="sim", dtype=torch.float64).copy_(h.t(), non_blocking=True)
    assert sim.counters()["copies.h2d.pageable"] == 2
    x = on_device(8, 8)
    assert torch.equal(x.t().to("cpu", torch.float64), x.cpu().t().double())


def test_events_measure_time(sim):
    sim.configure(op_time={"aten::add": 0.05, "": 0.0})
    a, b = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    x = torch.ones(3, device="sim")
    a.record()
    x = x + 1
    b.record()
    b.synchronize()
    assert 50 <= a.elapsed_time(b) < 1000


def test_syncs_are_counted(sim):
    x = on_device(4, 4)
    torch.accelerator.synchronize()
    before = sim.counters()
    y = (x @ x).relu_().softmax(-1).topk(2)[0]
    y[:, 0] += 1
    assert sim.counters()["syncs"] == before["syncs"]
    x.sum().item(), x.nonzero(), x.cpu(), torch.accelerator.current_stream().synchronize()
    x.to("cpu", non_blocking=True), torch.accelerator.current_stream().record_event().synchronize()
    after = sim.counters() - before
    assert [after[f"sync.{k}"] for k in ("item", "nonzero", "copy", "stream", "event")] == [1] * 5
    assert after["syncs"] == 5


def test_waits_of_other_threads_are_counted_apart(sim):
    event = torch.accelerator.current_stream().record_event()
    t = threading.Thread(target=event.synchronize)
    t.start(), t.join()
    c = sim.counters()
    assert c["syncs"] == 0 and c["aside.event"] == 1


def test_a_model_of_transformers(sim, tmp_path):
    "A whole model, with its own experts: forward, greedy and sampled generation, bit for bit."
    from transformers import AutoModelForCausalLM

    from expertflow.testing import write_checkpoint
    path = write_checkpoint("olmoe", tmp_path, dtype="bfloat16")
    ids = torch.randint(3, 300, (2, 17))
    sim.configure(delay=1e-4)
    for experts in ("eager", "grouped_mm"):
        seen = []
        for device in ("cpu", "sim"):
            kw = {"attn_implementation": "eager", "experts_implementation": experts, "device_map": {"": device}, "dtype": "auto"}
            model, x = AutoModelForCausalLM.from_pretrained(path, **kw).eval(), ids.to(device)
            torch.manual_seed(0)
            with torch.no_grad(): seen.append([model(x).logits.cpu()])
            for sample in (False, True): seen[-1].append(model.generate(x, max_new_tokens=8, do_sample=sample).cpu())
        assert all(torch.equal(a, b) for a, b in zip(*seen))


@pytest.mark.parametrize("seed", range(3))
def test_delays_change_no_result(sim, seed):
    sim.configure(delay=0.003, seed=seed)
    side, main = torch.Stream("sim"), torch.accelerator.current_stream()
    x, h = on_device(16, 16), pinned(256, 0.5)
    slot = torch.empty(16, 16, device="sim")
    for _ in range(10):
        side.wait_stream(main)
        with side: slot.copy_(h.view(16, 16), non_blocking=True)
        main.wait_stream(side)
        x = torch.tanh(x @ slot)
    y = on_device(16, 16).cpu()
    for _ in range(10): y = torch.tanh(y @ h.view(16, 16))
    assert torch.equal(x.cpu(), y)


def test_errors_of_workers_come_with_the_next_sync(sim):
    x = on_device(5)
    y = x[torch.tensor([9], device="sim")]      # only the kernel can know
    with pytest.raises(RuntimeError, match=r"asynchronous error.*aten::index on stream 0.*out of bounds"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()     # told once
    assert y.shape == (1,) and (x + 1).shape == (5,)


# memory

def test_capacity(sim):
    sim.configure(capacity=4 * MB)
    start = sim.counters()["memory.allocated"]
    a = torch.empty(3 * MB, dtype=torch.uint8, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match="simdev: out of memory"):
        torch.empty(2 * MB, dtype=torch.uint8, device="sim")
    assert torch.accelerator.memory_allocated() == start + 3 * MB and torch.accelerator.get_memory_info()[1] == 4 * MB
    del a
    b = torch.empty(4 * MB - start, dtype=torch.uint8, device="sim")    # what lay cached is given back for it
    assert torch.accelerator.max_memory_allocated() == start + len(b) == 4 * MB
    del b
    torch.accelerator.reset_peak_memory_stats()
    assert sim.counters()["memory.peak"] == torch.accelerator.max_memory_allocated() == start
    sim.configure(capacity=8 * MB)
    assert torch.empty(6 * MB, dtype=torch.uint8, device="sim").nbytes == 6 * MB


def test_freed_blocks_stay_with_their_stream(sim):
    a = torch.empty(1000, device="sim")
    where = a.data_ptr()
    del a
    with torch.Stream("sim"): b = torch.empty(1000, device="sim")
    c = torch.empty(1000, device="sim")
    assert b.data_ptr() != where == c.data_ptr()


def test_record_stream_keeps_a_block_from_being_reused(sim):
    sim.configure(op_time={"aten::mul": 0.2})
    side = torch.Stream("sim")
    a = torch.ones(1000, device="sim")
    where = a.data_ptr()
    side.wait_stream(torch.accelerator.current_stream())
    with side: a * 2
    a.record_stream(side)
    del a
    assert torch.empty(1000, device="sim").data_ptr() != where
    side.synchronize()
    assert torch.empty(1000, device="sim").data_ptr() == where


def test_record_stream_of_one_that_waits(sim):
    "The block comes back when the stream that was recorded has come so far, and so the one that it had to wait for."
    sim.configure(op_time={"aten::mul": 0.2})
    side, other = torch.Stream("sim"), torch.Stream("sim")
    a = torch.ones(1000, device="sim")
    where = a.data_ptr()
    side.wait_stream(torch.accelerator.current_stream())
    with side: a * 2
    other.wait_stream(side)
    a.record_stream(other)
    del a
    assert torch.empty(1000, device="sim").data_ptr() != where and not side.query()
    other.synchronize()
    assert torch.empty(1000, device="sim").data_ptr() == where


def test_threads_with_a_stream_each(sim):
    sim.configure(delay=3e-4, capacity=2 * MB)
    wrong = []

    def work(k):
        with torch.Stream("sim") as s:
            for i in range(40):
                n = (10, 1000, 30000)[(i * k + i // 3) % 3]
                x = torch.full((n,), float(i)).pin_memory().to("sim", non_blocking=True)    # the source is freed at once
                y = (x * 2 + 1).to("cpu", non_blocking=True)
                s.record_event().synchronize()
                if not y.eq(2 * i + 1).all(): wrong.append((k, i))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 5)]
    for t in threads: t.start()
    for t in threads: t.join()
    c = sim.counters()
    assert not wrong and c["aside.event"] == 160 and c["memory.refused"] == 0


def test_pinned_memory_is_rounded_and_limited(sim):
    sim.configure(pinned_capacity=4 * MB)
    a = torch.empty(3 * MB, dtype=torch.uint8, pin_memory=True)
    assert a.is_pinned() and a[5:].is_pinned() and not torch.empty(3).is_pinned()
    assert sim.counters()["memory.pinned"] == 4 * MB
    with pytest.raises(RuntimeError, match="cannot pin"): torch.empty(1, pin_memory=True)
    del a
    assert torch.empty(4 * MB, dtype=torch.uint8, pin_memory=True).is_pinned()


def test_pinned_memory_may_be_freed_while_it_is_copied(sim):
    sim.configure(link=10 * MB)
    d = pinned(MB // 4, 3.0).to("sim", non_blocking=True)
    other = pinned(MB // 4, 4.0)
    assert d.cpu().eq(3).all() and other.eq(4).all()


def test_registered_memory_is_pinned(sim):
    own = torch.ones(MB // 4)
    torch.empty(1, pin_memory=True)     # torch does not ask before something has been pinned
    torch.sim.host_register(own.data_ptr(), own.nbytes)
    assert own.is_pinned()
    d = own.to("sim", non_blocking=True)
    assert d.cpu().eq(1).all() and sim.counters()["copies.h2d.pinned"] == 1
    torch.sim.host_unregister(own.data_ptr())
    assert not own.is_pinned()


def test_host_cannot_touch_device_memory(tmp_path):
    def touch():
        x = torch.ones(3, device="sim")
        torch.accelerator.synchronize()
        os.write(1, b"before\n")
        ctypes.string_at(x.data_ptr(), 4)
        os.write(1, b"after\n")

    code, out = in_fork(touch, tmp_path)
    assert code == -signal.SIGSEGV
    assert out.startswith("before\nsimdev: the host touched device memory (offset 0)") and "after" not in out


# hazards: with the wait there is none; without it there is, even where the timing hides it

@pytest.mark.parametrize("wait", [True, False])
def test_compute_before_ready(sim, wait):
    copies, main = torch.Stream("sim"), torch.accelerator.current_stream()
    h, slot = pinned(100, 2.0), torch.zeros(100, device="sim")
    copies.wait_stream(main)
    with copies: slot.copy_(h, non_blocking=True)
    ready = copies.record_event()
    time.sleep(0.05)
    if wait: main.wait_event(ready)
    y = slot + 1
    [h] = sim.hazards() or [None]
    torch.accelerator.synchronize()
    assert y.cpu().eq(3).all(), "here the race is won, which is why results do not show it"
    if wait: assert h is None
    else: assert h[:5] == ("read before ready", "copy h2d", h.first_stream, "aten::add", 0) and h.range.startswith("device[")


@pytest.mark.parametrize("wait", [True, False])
def test_overwritten_while_read(sim, wait):
    copies, main = torch.Stream("sim"), torch.accelerator.current_stream()
    h, slot = pinned(100, 2.0), torch.zeros(100, device="sim")
    y = slot + 1
    used = main.record_event()
    time.sleep(0.05)
    if wait: copies.wait_event(used)
    else: copies.wait_event(torch.Event("sim"))     # one that was never recorded orders nothing
    with copies: slot.copy_(h, non_blocking=True)
    assert kinds(sim) == (set() if wait else {"overwritten while read", "written twice"})
    assert y.cpu().eq(1).all()


@pytest.mark.parametrize("wait", ["event", "query", "device", None])
def test_staging_reused(sim, wait):
    slots, stage = torch.empty(2, 100, device="sim"), pinned(100, 1.0)
    slots[0].copy_(stage, non_blocking=True)
    copied = torch.accelerator.current_stream().record_event()
    time.sleep(0.05)
    if wait == "event": copied.synchronize()
    if wait == "query": assert copied.query()
    if wait == "device": torch.accelerator.synchronize()
    stage.numpy()[:] = 2        # as a read from disk would: torch does not see it
    slots[1].copy_(stage, non_blocking=True)
    assert kinds(sim) == (set() if wait else {"staging reused"})
    assert slots.cpu()[:, 0].tolist() == [1, 2]


@pytest.mark.parametrize("wait", ["record_stream", "wait", "record_stream of one that waits", "of one that does not", None])
def test_missing_record_stream(sim, wait):
    side, other, main = torch.Stream("sim"), torch.Stream("sim"), torch.accelerator.current_stream()
    x = torch.ones(100, device="sim")
    side.wait_stream(main)
    with side: y = x * 2
    if wait == "record_stream": x.record_stream(side)
    if wait == "wait": main.wait_stream(side)
    if wait == "record_stream of one that waits": other.wait_stream(side)
    if wait and " of " in f" {wait}": x.record_stream(other)
    del x
    hs = sim.hazards()
    assert [h.kind for h in hs] == (["missing record_stream"] if wait in ("of one that does not", None) else [])
    if hs: assert hs[0].first == "aten::mul" and hs[0].second == "free"
    torch.accelerator.synchronize()
    assert y.cpu().eq(2).all()


@pytest.mark.parametrize("wait", [True, False])
def test_host_reads_before_a_copy_has_arrived(sim, wait):
    x = torch.arange(8, device="sim")
    h = x.to("cpu", non_blocking=True)
    assert h.is_pinned()
    time.sleep(0.05)
    if wait: torch.accelerator.current_stream().synchronize()
    assert h.tolist() == list(range(8))
    assert kinds(sim) == (set() if wait else {"host too early"})


def test_rows_beside_the_one_in_flight_may_be_used(sim):
    rows = torch.zeros(4, 100).pin_memory()
    x = torch.ones(100, device="sim")
    torch.accelerator.synchronize()
    rows[1].copy_(x, non_blocking=True)
    rows[2] += 1
    y = rows[0].to("sim", non_blocking=True)
    assert rows[2, 0] == 1 and not sim.hazards()
    torch.accelerator.synchronize()
    rows[1] += 1
    rows[0] += 1
    assert rows[:, 0].tolist() == [1, 2, 1, 0] and y.cpu().eq(0).all()


def test_hazard_is_told_once_and_reads_well(sim):
    side, x = torch.Stream("sim"), torch.ones(10, device="sim")
    with side:
        for _ in range(5): x + 1
    torch.accelerator.synchronize()
    [h] = sim.hazards()
    assert str(h).startswith(f"read before ready: aten::fill_ on stream 0, then aten::add on stream {h.second_stream}, device[")


# life and death

def test_exit_is_clean():
    "With work under way, an error that nobody waited for, and tensors alive."
    needs_device()
    program = textwrap.dedent(f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        import torch, simdev
        simdev.configure(op_time=0.1)
        x = torch.ones(3, device="sim")
        y = x[torch.tensor([7], device="sim")] + 1
        h = x.to("cpu", non_blocking=True)
        keep = [x, y, h, torch.Stream("sim"), torch.accelerator.current_stream().record_event()]
        print("end")
        """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "end\n")
    assert "asynchronous error that nobody waited for: aten::index" in done.stderr


def test_a_fork_of_the_process_is_told_so(tmp_path):
    def fork():
        x, y = torch.ones(3, device="sim"), torch.ones(3).pin_memory()
        x.to("cpu", non_blocking=True)
        if not (pid := os.fork()):
            for f in (lambda: x + 1, torch.accelerator.synchronize, lambda: torch.ones(3).pin_memory()):
                with pytest.raises(RuntimeError, match="forked after the device was started"): f()
            del x, y
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert x.cpu().tolist() == [1, 1, 1]

    assert in_fork(fork, tmp_path) == (0, "")


def test_a_test_that_crashes_or_leaves_hazards_fails_alone(tmp_path):
    needs_device()
    (tmp_path / "test_it.py").write_text(textwrap.dedent("""
        import os, signal, torch
        pytest_plugins = ["simdev.plugin"]
        def test_crash(sim): os.kill(os.getpid(), signal.SIGSEGV)       # not by device memory: the usual way
        def test_exit(sim): os._exit(0)
        def test_hazard(sim):
            x = torch.ones(9, device="sim")
            with torch.Stream("sim"): x + 1
            torch.accelerator.synchronize()
        def test_error(sim): torch.ones(9, device="sim")[torch.tensor([9], device="sim")]
        def test_good(sim): assert torch.accelerator.is_available()
        def test_outside(): assert not torch.accelerator.is_available()
        """))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", "-q", "-rA", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path,
                          env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)})
    last = done.stdout.splitlines()[-1]
    assert "2 failed, 4 passed, 2 errors" in last, done.stdout
    assert "ended by signal 11" in done.stdout and "ended early" in done.stdout
    assert "read before ready: aten::fill_" in done.stdout and "index 9 is out of bounds" in done.stdout


def test_other_tests_do_not_see_it():
    assert torch._C._get_privateuse1_backend_name() == "privateuseone" and not hasattr(torch, "sim")



# kernels that read a part of what they are given

@pytest.mark.parametrize("touched", [False, True], ids=["others", "touched"])
@pytest.mark.parametrize("op", ["grouped_mm", "index"])
def test_rows_that_nobody_asks_for_may_be_on_their_way(sim, op, touched):
    "A grouped product reads the weights of groups that have rows, indexing the rows of the index; and the host does not wait."
    slots = torch.zeros(4, 1024, device="sim")      # of which the first half is a weight
    weights = slots[:, :512].view(4, 16, 32)
    ends = torch.tensor([2, 3, 5, 5] if touched else [2, 2, 5, 5], dtype=torch.int32).pin_memory().to("sim", non_blocking=True)
    index = torch.tensor([0, 1] if touched else [0, 2]).pin_memory().to("sim", non_blocking=True)
    x, source, stream = on_device(5, 16), torch.ones(1024).pin_memory(), torch.Stream("sim")
    torch.accelerator.synchronize()
    syncs = sim.counters()["syncs"]
    with stream: slots[1].copy_(source, non_blocking=True)
    got = torch.nn.functional.grouped_mm(x, weights, offs=ends) if op == "grouped_mm" else weights[index]
    assert sim.counters()["syncs"] == syncs and got.shape[-1] == 32
    assert kinds(sim) == ({"read before ready"} if touched else set())
    if touched: sim.reset()


def test_convolutions_and_complex_numbers(sim):
    x, w, b = torch.randn(2, 6, 9), torch.randn(6, 1, 4), torch.randn(6)
    want = torch.nn.functional.conv1d(x, w, b, padding=3, groups=6)
    assert torch.equal(torch.nn.functional.conv1d(x.to("sim"), w.to("sim"), b.to("sim"), padding=3, groups=6).cpu(), want)
    pairs, turn = torch.randn(3, 4, 2), torch.polar(torch.ones(3, 4), torch.randn(3, 4))
    want = torch.view_as_real(torch.view_as_complex(pairs) * turn)
    assert torch.equal(torch.view_as_real(torch.view_as_complex(pairs.to("sim")) * turn.to("sim")).cpu(), want)
