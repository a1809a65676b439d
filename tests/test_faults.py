"""Everything that can go wrong does: the error is one line, it reaches whoever waits, and the next request is right."""

import asyncio
import copy
import errno
import gc
import inspect
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from faulty import Disk, Interrupt, books_of_a_retry, open_files
from safetensors.torch import load_file, save_file
from transformers import (
    AsyncTextIteratorStreamer,
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    TextIteratorStreamer,
)
from transformers.utils import logging

import expertflow.cache
import expertflow.flow
import expertflow.mover
import expertflow.runtime
from expertflow.cache import ABSENT, balance, check
from expertflow.config import (
    BudgetError,
    CheckpointError,
    ConfigError,
    ExpertFlowError,
    LoadError,
    UnsupportedModelError,
)
from expertflow.flow import ExpertFlow
from expertflow.testing import write_checkpoint, write_tokenizer

logging.set_verbosity_error()
logging.disable_progress_bar()
MODES = ("grouped_mm", "eager")
BOOKS = (expertflow.runtime, expertflow.mover, expertflow.cache)
X = torch.randint(3, 320, (1, 40), generator=torch.Generator().manual_seed(0))


def ours():
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("expertflow"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"), tokenizer=True)


@pytest.fixture
def path(base, tmp_path, monkeypatch):
    "A checkpoint that may be damaged; afterwards there is no thread, no open file, no temporary folder."
    threads = ours()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    yield Path(shutil.copytree(base, tmp_path / "model"))
    gc.collect()
    assert ours() == threads and not open_files(tmp_path) and not os.listdir(tmp_path / "tmp")


@pytest.fixture(scope="module")
def want(base):
    "Logits of X and 12 new tokens, by mode."
    out = {}
    for mode in MODES:
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", experts_implementation=mode).eval()
        for name, p in model.named_parameters():
            if "experts" in name:
                p.data = p.data.clone()
        with torch.no_grad():
            out[mode] = model(X).logits, model.generate(X, max_new_tokens=12, do_sample=False)
    return out


def load(path, mode="grouped_mm", budget="0.001%", **kw):
    kw = {"context": 64, "preload": False, "experts_implementation": mode, **kw}
    flow = ExpertFlow.from_pretrained(path, gpu_memory_budget=budget, **kw)
    flow.runtime.poison = True
    return flow


def generate(flow, n=12, **kw):
    return flow.model.generate(X, max_new_tokens=n, do_sample=False, **kw)


def free_lock(lock):
    "Whether another thread could have it now."
    got = []
    t = threading.Thread(target=lambda: got.append(lock.acquire(blocking=False) and (lock.release() or True)))
    t.start()
    t.join()
    return got[0]


def settled(flow):
    "Nothing is pinned or leaked; once the reads under way have ended, nothing is loading either."
    rt = flow.runtime
    check(rt.cache)
    assert not rt.cache.pins.any() and rt.in_progress is None
    rt.reap(wait=True)
    check(rt.cache)
    assert balance(rt.cache) == 0 and not rt.cache.loading.any() and not rt.executor.tickets._open
    assert free_lock(rt.lock)


def works(flow, want, mode="grouped_mm"):
    with torch.no_grad():
        assert torch.equal(flow.model(X).logits, want[mode][0])
    assert torch.equal(generate(flow), want[mode][1])
    settled(flow)


def one_line(e):
    text = str(e.value)
    assert text and "\n" not in text and len(text) < 600, text
    return text


# ---- reads that fail ----


def forget(flow, layer, expert):
    "Empties the expert's slot, so that the next request that needs it has to read it."
    cache = flow.runtime.cache
    if (slot := cache.slot_of[layer][expert]) != ABSENT:
        cache.drop(slot)
        cache.free.append(slot)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", ["0.001%", "25%", "80%"])
def test_a_read_fails(mode, budget, path, want, monkeypatch):
    "The first, a middle and the last expert that a layer-step reads, in the first, the second and the last layer."
    with load(path, mode, budget) as flow:
        disk = Disk(flow, monkeypatch)
        works(flow, want, mode)
        for layer in range(3):
            for which in (0, 0.5, 1):
                flow.runtime.cache.begin(0, [])  # something else in between
                disk.log.clear()
                generate(flow)
                read = [e for at, e in disk.log if at == layer]
                if not read:
                    continue
                expert = read[int(which * (len(read) - 1))]
                forget(flow, layer, expert)  # what is resident by now depends on the order in which reads ended
                disk.break_at((layer, expert))
                with pytest.raises(LoadError) as e:
                    generate(flow)
                text = one_line(e)
                assert f"expert {expert} of model.layers.{layer}." in text and ".safetensors" in text
                assert os.strerror(errno.EIO) in text and flow.generations[-1].error == f"LoadError: {text}"
                settled(flow)
                disk.rule = None
                works(flow, want, mode)


@pytest.mark.parametrize("mode", MODES)
def test_every_read_fails_in_turn(mode, path, want, monkeypatch):
    "The n-th read of a request fails once, for every n; the request after it is right."
    with load(path, mode) as flow:
        disk = Disk(flow, monkeypatch)
        for n in range(1, 60, 3):
            count = [0]

            def rule(at, n=n, count=count):
                count[0] += 1
                if count[0] == n:
                    raise OSError(errno.EIO, "boom")

            disk.rule = rule
            with pytest.raises(LoadError, match="boom"), torch.no_grad():
                for _ in range(20):
                    flow.model(X)
            disk.rule = None
            check(flow.runtime.cache)
            assert not flow.runtime.cache.pins.any()
            with torch.no_grad():
                assert torch.equal(flow.model(X).logits, want[mode][0])
        settled(flow)


def test_all_reads_fail(path, want, monkeypatch):
    with load(path) as flow:
        disk = Disk(flow, monkeypatch)
        disk.break_at(*((layer, e) for layer in range(3) for e in range(8)))
        for _ in range(5):
            with pytest.raises(LoadError):
                generate(flow)
            settled(flow)
        disk.rule = None
        works(flow, want)


@pytest.mark.parametrize("n", [1, 10, 24])
def test_a_read_fails_while_preloading(n, path, monkeypatch):
    disk, count = Disk(None, monkeypatch), [0]

    def rule(at):
        count[0] += 1
        if count[0] == n:
            raise OSError(errno.EIO, "boom")

    disk.rule = rule
    with pytest.raises(LoadError, match="boom") as e:
        load(path, budget="100%", preload=True)
    assert ".safetensors" in one_line(e) and (n == 1 or re.search(r"expert \d of model.layers", str(e.value)))


@pytest.mark.parametrize("policy", ["arc", "s3_fifo", "forecast"])
def test_policies_learn_which_loads_were_called_off(policy, path, want, monkeypatch):
    "Those with lists of their own: whoever is in their lists is in a slot, also after a read has failed with others behind it."
    with load(path, budget="50%", eviction_policy=policy) as flow, torch.no_grad():
        disk, cache, count = Disk(flow, monkeypatch), flow.runtime.cache, [0]

        def rule(at):
            count[0] += 1
            if count[0] == 1:
                raise OSError(errno.EIO, "boom")
            time.sleep(0.02)

        for _ in range(3):
            count[0], disk.rule, called_off = 0, rule, flow.runtime.executor.moved.cancelled
            with pytest.raises(LoadError, match="boom"):
                flow.model(X)
            assert flow.runtime.executor.moved.cancelled > called_off
            evictor = cache.evictor
            listed = evictor.queue > 0 if policy == "s3_fifo" else evictor.inside
            assert set(listed.nonzero()[0]) == set(cache.owner[cache.owner != ABSENT])
            disk.rule = None
            works(flow, want)
            for layer in range(3):
                for e in range(0, 8, 2):
                    forget(flow, layer, e)


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "Stale"), TimeoutError("nfs"), SystemExit(3), ValueError("odd")])
def test_odd_errors(error, path, want, monkeypatch):
    "Whatever a reader thread raises reaches the caller, and the thread lives on."
    with load(path) as flow:
        disk = Disk(flow, monkeypatch)

        def rule(at):
            raise error

        disk.rule = rule
        with pytest.raises((LoadError, type(error))):
            generate(flow)
        disk.rule = None
        works(flow, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("times", [1, 2])
def test_a_prefetch_fails_when_it_is_waited_for(times, mode, path, want, monkeypatch):
    "The step that needs the expert reads it itself. If that fails, too, it is an error."
    with load(path, mode, "50%") as flow, torch.no_grad():
        disk = Disk(flow, monkeypatch)
        disk.break_when_waited_for(flow, monkeypatch, 0, 3, times)
        assert flow.runtime.prefetch(0, [3]) == 1
        if times == 1:
            assert torch.equal(flow.model(X).logits, want[mode][0])
            books_of_a_retry(flow, disk, 0, 3)
        else:
            with pytest.raises(LoadError, match=os.strerror(errno.EIO) + r".* expert 3 of model.layers.0") as e:
                flow.model(X)
            one_line(e)
            assert disk.log.count((0, 3)) == 2
        works(flow, want, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", ["0.001%", "25%", "50%"])
def test_guesses_and_faults_at_random(mode, budget, path, want, monkeypatch):
    "Whatever becomes of a prefetch is in the books, also when layer-steps break off."
    with load(path, mode, budget, paced_link="50MB/s") as flow, torch.no_grad():
        rt, disk, r = flow.runtime, Disk(flow, monkeypatch), random.Random(budget)
        dice = random.Random(1)
        rt.executor.chunk_bytes = 1000

        def rule(at):
            if dice.random() < 0.002:
                raise OSError(errno.EIO, "boom")

        def prefetcher(layer, experts):
            for _ in range(r.randrange(3)):
                yield r.randrange(3), r.sample(range(8), r.randrange(1, 5))
            if r.random() < 0.02:
                raise ValueError("no guess")

        disk.rule, rt.prefetcher, ended = rule, prefetcher, {True: 0, False: 0}
        for i in range(60):
            try:
                flow.model(X[:, : 1 + 13 * (i % 3)])
                ended[True] += 1
            except (LoadError, ValueError):
                ended[False] += 1
            check(rt.cache)
            assert balance(rt.cache) == 0, (i, rt.cache.count)
            if r.random() < 0.2:
                rt.resize(r.choice([2, 3, 6, 12]))
                assert balance(rt.cache) == 0, (i, rt.cache.count)
        c = rt.cache.count
        assert min(ended.values()) > 3 and min(c.in_time + c.late, c.wasted + c.cancelled) > 0, (ended, c)
        disk.rule = rt.prefetcher = None
        works(flow, want, mode)


def test_short_reads(path, want, monkeypatch):
    "A file system may give less than was asked for, and nothing at the end of a file."
    with load(path) as flow:
        disk = Disk(flow, monkeypatch)
        monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: disk.real(fd, [bufs[0][:100]], at))
        works(flow, want)
        monkeypatch.setattr(os, "preadv", lambda fd, bufs, at: 0)
        with pytest.raises(LoadError, match="ended at byte"):
            generate(flow)
        monkeypatch.setattr(os, "preadv", disk.real)
        works(flow, want)


# ---- files that change ----


class Meanwhile(LogitsProcessor):
    "Does something after the n-th token."

    def __init__(self, n, do):
        self.n, self.do = n, do

    def __call__(self, input_ids, scores):
        self.n -= 1
        if self.n == 0:
            self.do()
        return scores


def vandalise(path, how):
    "Changes every file of a checkpoint; returns what undoes it."
    undo = []
    for f in sorted(path.glob("*.safetensors")):  # first the list: a replaced file could be met twice
        st, data, away = f.stat(), f.read_bytes(), f.with_suffix(".away")
        if how == "truncated":
            os.truncate(f, 100)
        elif how == "overwritten":
            f.write_bytes(data[:-8] + b"\xff" * 8)
            os.utime(f, ns=(st.st_atime_ns, st.st_mtime_ns + 10**9))
        else:
            f.rename(away)
            if how == "replaced":
                f.write_bytes(data)
        undo.append((f, st, data, away))

    def restore():
        for f, st, data, away in undo:
            if away.exists():
                away.replace(f)
            else:
                f.write_bytes(data)
            os.utime(f, ns=(st.st_atime_ns, st.st_mtime_ns))

    return restore


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["truncated", "overwritten", "deleted", "replaced"])
def test_files_change_in_the_middle(how, mode, path, want):
    with load(path, mode) as flow:
        restore = []
        meanwhile = LogitsProcessorList([Meanwhile(3, lambda: restore.append(vandalise(path, how)))])
        with pytest.raises(CheckpointError, match="changed while in use") as e:
            generate(flow, logits_processor=meanwhile)
        assert ".safetensors" in one_line(e)
        settled(flow)
        with pytest.raises(CheckpointError, match="changed while in use"):
            generate(flow)
        restore[0]()
        works(flow, want, mode)


# ---- the error reaches who waits ----


def broken(path, monkeypatch, after=40):
    "A flow whose disk fails after some reads."
    flow = load(path)
    disk, count = Disk(flow, monkeypatch), [0]

    def rule(at):
        count[0] += 1
        if count[0] > after:
            raise OSError(errno.EIO, "boom")

    disk.rule = rule
    return flow, disk


def test_error_reaches_the_consumer_of_a_streamer(path, want, monkeypatch):
    flow, disk = broken(path, monkeypatch)
    with flow:
        streamer, raised = TextIteratorStreamer(flow.tokenizer, timeout=30), []

        def work():
            try:
                generate(flow, streamer=streamer)
            except LoadError as e:
                raised.append(e)

        t = threading.Thread(target=work)
        t.start()
        with pytest.raises(LoadError, match="boom") as e:
            list(streamer)
        t.join(10)
        assert raised == [e.value]
        disk.rule = None
        works(flow, want)


def test_error_reaches_the_consumer_of_an_asynchronous_streamer(path, want, monkeypatch):
    flow, disk = broken(path, monkeypatch)

    async def consume():
        streamer = AsyncTextIteratorStreamer(flow.tokenizer, timeout=30)
        task = asyncio.create_task(asyncio.to_thread(generate, flow, streamer=streamer))
        with pytest.raises(LoadError, match="boom"):
            async for _ in streamer:
                pass
        with pytest.raises(LoadError, match="boom"):
            await task

    with flow:
        asyncio.run(consume())
        disk.rule = None
        works(flow, want)


def test_error_reaches_the_consumer_of_stream(path, want, monkeypatch):
    flow, disk = broken(path, monkeypatch, after=60)
    with flow:
        threads = ours()
        for use in (flow.stream, flow.generate):
            with pytest.raises(LoadError, match="boom") as e:
                list(use("The quick brown fox", max_new_tokens=20))
            one_line(e)
            assert ours() == threads
        with pytest.raises(ValueError):  # not only our own errors
            list(flow.stream("fox", max_new_tokens=5, no_such_keyword=1))
        with pytest.raises(ExpertFlowError, match="streamer"):
            list(flow.stream("fox", streamer=TextIteratorStreamer(flow.tokenizer)))
        disk.rule = None
        works(flow, want)


def test_tokens_of_a_batch_that_breaks_off_are_counted(path):
    with load(path, batch=2) as flow:
        def breaks(ids, scores, **_):
            if ids.shape[1] == X.shape[1] + 3:
                raise TimeoutError("mine")
            return torch.zeros(len(ids), dtype=torch.bool)

        with pytest.raises(TimeoutError):
            flow.model.generate(X[:1].repeat(2, 1), max_new_tokens=9, do_sample=False, stopping_criteria=[breaks])
        assert flow.generations[-1].new_tokens == 2 * 3 and flow.generations[-1].error == "TimeoutError: mine"


def test_a_consumer_that_stops_early(path, want):
    with load(path) as flow:
        threads = ours()
        stream = flow.stream("The quick brown fox", max_new_tokens=35, do_sample=False)
        next(stream)
        assert len(ours()) == len(threads) + 1
        stream.close()
        assert ours() == threads and flow.generations[-1].new_tokens < 35
        for _ in flow.stream("The quick brown fox", max_new_tokens=35):
            break
        gc.collect()
        assert ours() == threads
        mine = []
        list(flow.stream("fox", max_new_tokens=5, stopping_criteria=[lambda ids, scores, **_: bool(mine.append(1))]))
        assert len(mine) == 5
        works(flow, want)


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_while_the_prompt_is_read(mode, path, want):
    "Ends at the next layer, without an error and without a token; what comes after is as ever."
    with load(path, mode) as flow:
        threads, stop, steps = ours(), threading.Event(), flow.runtime.cache.count.steps
        blocks = flow.model.model.layers
        hook = blocks[0].register_forward_hook(lambda *_: stop.set())
        assert list(flow.stream("The quick brown fox", max_new_tokens=20, stop=stop)) == []
        hook.remove()
        run, done = flow.generations[-1], flow.runtime.cache.count.steps - steps
        assert done == 1 < len(blocks) and run.new_tokens == 0 and ours() == threads
        assert run.error == "Stopped: while the prompt was being read"
        assert "stopped    while the prompt was being read" in str(flow.report())
        stop.clear()
        pieces = []
        for piece in flow.stream("The quick brown fox", max_new_tokens=30, do_sample=False, stop=stop):  # and after some tokens
            pieces.append(piece)
            stop.set()
        assert pieces and 0 < flow.generations[-1].new_tokens < 30 and flow.generations[-1].error is None
        for odd in (True, threading.Event, SimpleNamespace(is_set=False)):  # the second one: its () forgotten
            with pytest.raises(ExpertFlowError, match=r"^stop=.*: give a threading.Event"):
                list(flow.stream("fox", stop=odd))
        works(flow, want, mode)


# ---- reads that hang ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_stuck_read(mode, threads, path, want, monkeypatch):
    "Raises within load_timeout; once the disk is back, the bits are right."
    with load(path, mode, load_timeout=0.4, io_threads=threads) as flow:
        disk, gate = Disk(flow, monkeypatch), threading.Event()
        disk.rule = lambda at: gate.wait(60)
        for _ in range(3):
            t = time.perf_counter()
            with pytest.raises(LoadError, match=r"expert \d of MoE layer \d has not arrived within 0.4 s") as e:
                generate(flow)
            one_line(e)
            assert time.perf_counter() - t < 20  # not for ever; a busy machine is slow
            check(flow.runtime.cache)
            assert not flow.runtime.cache.pins.any()
        gate.set()
        disk.rule = None
        works(flow, want, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_read_that_outlives_its_request_and_fails_is_done_again(mode, path, want, monkeypatch):
    "The next request finds the expert on its way; that the disk failed for the last one is not its affair."
    with load(path, mode, "25%", io_threads=2) as flow:
        disk, begun, gate, seen = Disk(flow, monkeypatch), threading.Event(), threading.Event(), []

        def rule(at):
            seen.append(at)
            if seen.count((0, 0)) == 1 and at == (0, 0):  # the first one that is waited for fails, once another is being read,
                begun.wait(60)
                raise OSError(errno.EIO, "boom")
            if not begun.is_set():  # which fails when nobody waits any more
                begun.set()
                gate.wait(60)
                raise OSError(errno.EIO, "stale")

        disk.rule = rule
        with pytest.raises(LoadError, match="boom"):
            flow.model(X)
        cache = flow.runtime.cache
        left = cache.loading.sum()
        assert left >= 1 and not cache.pins.any()
        before = cache.count.loads
        timer = threading.Timer(0.3, gate.set)  # the next request waits for it by then
        timer.start()
        works(flow, want, mode)
        timer.join()
        assert len(seen) > 2 and cache.count.loads > before


@pytest.mark.parametrize("mode", MODES)
def test_one_read_hangs_for_a_while(mode, path, want, monkeypatch):
    "Other requests that do not need this expert go on in the slots that are left."
    with load(path, mode, "25%", load_timeout=0.4) as flow:
        disk, gate, first = Disk(flow, monkeypatch), threading.Event(), {}

        def rule(at):
            if first.setdefault("at", at) == at:
                gate.wait(60)

        disk.rule = rule
        with pytest.raises(LoadError, match="has not arrived"):
            generate(flow)
        for _ in range(3):
            with pytest.raises(LoadError, match="has not arrived"):
                generate(flow)
        deadline = time.monotonic() + 20
        while flow.runtime.cache.loading.sum() > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
            flow.runtime.reap()
        assert flow.runtime.cache.loading.sum() == 1
        gate.set()
        works(flow, want, mode)


# ---- Ctrl-C ----


def interrupt_soon(seconds):
    t = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    t.start()
    return t


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", ["0.001%", "50%"])
def test_interrupted_while_waiting(mode, budget, path, want, monkeypatch):
    "The reads under way go on; the next request comes at once and waits for them where it must."
    with load(path, mode, budget) as flow:
        disk = Disk(flow, monkeypatch)
        disk.rule = lambda at: time.sleep(0.5)
        timer = interrupt_soon(0.25)
        t = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            generate(flow)
        timer.join()
        assert time.perf_counter() - t < 20
        assert flow.generations[-1].error == "KeyboardInterrupt: "
        check(flow.runtime.cache)
        assert not flow.runtime.cache.pins.any() and flow.runtime.cache.loading.any()
        disk.rule = None
        works(flow, want, mode)


def test_interrupted_while_streaming(path, want, monkeypatch):
    with load(path) as flow:
        threads, disk = ours(), Disk(flow, monkeypatch)
        disk.rule = lambda at: time.sleep(0.02)
        timer = interrupt_soon(0.3)
        with pytest.raises(KeyboardInterrupt):
            list(flow.stream("The quick brown fox", max_new_tokens=40))
        timer.join()
        assert ours() == threads
        disk.rule = None
        works(flow, want)


@pytest.mark.parametrize("mode", MODES)
def test_interrupted_anywhere(mode, path, want):
    "Before any line of the runtime and of the cache; the next request has the right bits, and nothing has leaked."
    with load(path, mode, "12%") as flow, torch.no_grad():
        flow.model(X)
        count, before = Interrupt(10**9, *BOOKS), sys.gettrace()
        sys.settrace(count)
        flow.model(X)
        sys.settrace(before)
        lines = 10**9 - count.left
        assert lines > 500
        for n in [*range(1, 150), *range(150, lines, max(1, lines // 150))]:
            sys.settrace(Interrupt(n, *BOOKS))
            try:
                flow.model(X)
                where = None
            except KeyboardInterrupt as e:
                where = traceback.extract_tb(e.__traceback__)[-2]
            finally:
                sys.settrace(before)
            check(flow.runtime.cache)
            assert not flow.runtime.cache.pins.any() and free_lock(flow.runtime.lock), (n, where)
            assert torch.equal(flow.model(X).logits, want[mode][0]), n
        assert where or n > lines - 200
        settled(flow)


# ---- what an offloaded model cannot do ----


def test_guards(path, want, tmp_path):
    with load(path) as flow:
        model = flow.model
        meta = torch.device("meta")
        for use in (
            lambda: model.to("meta"), lambda: model.to(meta), lambda: model.to(torch.bfloat16), lambda: model.half(),
            lambda: model.to(device="cpu", dtype=torch.float16), lambda: model.cuda(), lambda: model.bfloat16(),
            lambda: model.double(), lambda: model.to(torch.zeros(1, dtype=torch.float64)),
            lambda: model.save_pretrained(tmp_path / "out"), lambda: model.push_to_hub("x/y"), lambda: copy.deepcopy(model),
            lambda: pickle.dumps(model), lambda: torch.save(model, io.BytesIO()), lambda: flow.generate("x", input_ids=X),
        ):  # fmt: skip
            with pytest.raises(ExpertFlowError) as e:
                use()
            one_line(e)
        assert not (tmp_path / "out").exists()
        assert model.to("cpu") is model and model.to(torch.float32) is model and model.to(torch.device("cpu")) is model
        assert model.to(device="cpu", dtype=torch.float32) is model and model.cpu() is model and model.float() is model
        assert model.eval() is model and str(model) and model.num_parameters() > 0
        assert "offloaded" in repr(model.model.layers[0].mlp.experts.down_proj)
        assert not model._valid_auto_compile_criteria({}, model.generation_config)  # else a static cache compiles on a GPU
        with pytest.raises(ExpertFlowError, match="only there while"):
            model.model.layers[0].mlp.experts.down_proj[0]
        works(flow, want)
        assert torch.equal(copy.copy(model)(X).logits, model(X).logits)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_says_so_at_once(path, want):
    with load(path) as flow:
        readers = flow.runtime.executor.readers
        end, pid = os.pipe(), os.fork()
        if not pid:  # the child has no reader threads
            try:
                os.write(end[1], str(readers.submit(int).exception(timeout=5)).encode())
            finally:
                os._exit(0)
        os.close(end[1])
        assert b"forked" in os.read(end[0], 1000)
        os.close(end[0])
        os.waitpid(pid, 0)
        works(flow, want)


# ---- memory ----


def test_requests_that_outgrow_the_cache(path, want):
    with load(path, context=64, batch=2) as flow:
        steps, used = flow.runtime.cache.count.steps, flow.ledger.snapshot()
        three, two = X.expand(3, -1), X.expand(2, -1)
        for x, kw in (
            (X, {"max_new_tokens": 200}),
            (three, {"max_new_tokens": 24}),
            (X, {"max_new_tokens": 24, "num_beams": 3}),
            (two, {"max_new_tokens": 24, "num_beams": 2}),
            (X, {"max_new_tokens": 24, "num_return_sequences": 3, "do_sample": True}),
            (X, {"max_new_tokens": 24, "num_beams": 4, "num_return_sequences": 2}),
            (X, {"max_new_tokens": 200, "cache_implementation": "static"}),
        ):
            with pytest.raises(BudgetError, match=r"KV cache.*\d+ B.*reserved.*would fit") as e:
                flow.model.generate(x, **kw)
            one_line(e)
        assert flow.runtime.cache.count.steps == steps and flow.ledger.snapshot() == used
        assert flow.model.generate(two, max_new_tokens=24, do_sample=False).shape == (2, 64)
        assert flow.model.generate(X, max_new_tokens=24, num_beams=2, do_sample=False).shape == (1, 64)
        assert flow.model.generate(X, max_new_tokens=60, do_sample=False).shape == (1, 100)  # one sequence of both halves
        works(flow, want)


def test_caches_of_every_kind_are_admitted(path, want):
    from transformers import StaticCache

    greedy = {"do_sample": False}
    with load(path, context=64, batch=2) as flow:
        model, used = flow.model, flow.ledger.snapshot()
        own = StaticCache(config=model.config, max_cache_len=500)
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        with pytest.raises(BudgetError, match="1 x 500 tokens"):
            model.generate(X, max_new_tokens=2, **{name: own})
        if hasattr(model.generation_config, "max_cache_len"):
            with pytest.raises(BudgetError, match="1 x 500 tokens"):
                model.generate(X, max_new_tokens=2, cache_implementation="static", max_cache_len=500)
        model.generate(X, max_new_tokens=60, cache_implementation="static", disable_compile=True, **greedy)
        two = model.generate(X.expand(2, -1), max_new_tokens=4, cache_implementation="static", disable_compile=True, **greedy)
        assert two.shape == (2, 44)  # two of the earlier length would not have fitted
        assisted = model.generate(X, max_new_tokens=12, assistant_model=model, **greedy)
        assert torch.equal(assisted, want["grouped_mm"][1])
        with pytest.raises(BudgetError):  # two caches, one for each role
            model.generate(X, max_new_tokens=70, assistant_model=model, **greedy)
        assert flow.ledger.snapshot() == used and not flow.requests.taken


def test_requests_of_two_threads_share_the_reservation(path, want):
    with load(path, context=64) as flow:
        inside, go, first = threading.Event(), threading.Event(), []

        class Hold:
            def __call__(self, ids, scores, **_):
                inside.set()
                go.wait(60)
                return torch.zeros(len(ids), dtype=torch.bool)

        def run():
            first.append(flow.model.generate(X, max_new_tokens=20, do_sample=False, stopping_criteria=[Hold()]))

        t = threading.Thread(target=run)
        t.start()
        assert inside.wait(60)
        with pytest.raises(BudgetError, match="KV cache"):
            flow.model.generate(X, max_new_tokens=20, do_sample=False)
        go.set()
        t.join(60)
        assert torch.equal(first[0][:, :52], want["grouped_mm"][1])
        works(flow, want)


def test_settings_that_the_plan_must_know(path):
    for key, x in (("dtype", torch.float16), ("experts_implementation", "eager"), ("device_map", "auto")):
        with pytest.raises(ExpertFlowError, match=f"model_kwargs has '{key}'.*use the setting") as e:
            load(path, model_kwargs={key: x})
        one_line(e)


def test_a_stream_with_senseless_arguments_ends(path):
    with load(path) as flow, pytest.raises(TypeError):
        flow.generate("To be", logits_processor=5)


def test_the_smallest_budget(path, want):
    kw = {"system_reserve": 0, "context": 64, "preload": False}
    with pytest.raises(BudgetError) as e:
        ExpertFlow.from_pretrained(path, gpu_memory_budget="1kB", **kw)
    assert "OLMoE" in one_line(e) or "olmoe" in one_line(e)
    least = int(re.search(r"\((\d+) ?B", str(e.value))[1])
    with pytest.raises(BudgetError):
        ExpertFlow.from_pretrained(path, gpu_memory_budget=f"{least - 1}B", **kw)
    with ExpertFlow.from_pretrained(path, gpu_memory_budget=f"{least}B", **kw) as flow:
        assert flow.runtime.cache.n_slots == 2 and flow.ledger.free("device") == 0
        works(flow, want)
    shown = re.search(r"at least ([\d.]+ [kMG]?B)", str(e.value))[1]  # what people will type
    with ExpertFlow.from_pretrained(path, gpu_memory_budget=shown, **kw) as flow:
        works(flow, want)
    with pytest.raises(BudgetError, match=r"free now|more than there is") as e:
        ExpertFlow.from_pretrained(path, gpu_memory_budget="900TB", **kw)
    one_line(e)


# ---- broken checkpoints ----


def tensors(path):
    "All tensors, as one file from now on."
    out = {}
    for f in sorted(path.glob("*.safetensors")):
        out |= {k: v.clone() for k, v in load_file(f).items()}
        f.unlink()
    (path / "model.safetensors.index.json").unlink()
    return out


def edit(path, fn):
    t = tensors(path)
    fn(t)
    save_file(t, path / "model.safetensors", metadata={"format": "pt"})


def setting(path, **kw):
    f = path / "config.json"
    f.write_text(json.dumps({k: v for k, v in (json.loads(f.read_text()) | kw).items() if v is not ...}))


E5 = "model.layers.1.mlp.experts.5.up_proj.weight"
E8 = E5.replace("5", "8")
Q = "model.layers.1.self_attn.q_proj.weight"
SHARD = "model-00003-of-*.safetensors"
BROKEN = {
    "missing expert": (lambda p: edit(p, lambda t: t.pop(E5)), CheckpointError, r"missing.*layers\.1.*experts\.5"),
    "extra expert": (lambda p: edit(p, lambda t: t.update({E8: t[E5].clone()})), CheckpointError, r"experts\.8"),
    "missing dense tensor": (lambda p: edit(p, lambda t: t.pop(Q)), CheckpointError, "q_proj"),
    "missing embedding": (lambda p: edit(p, lambda t: t.pop("model.embed_tokens.weight")), CheckpointError, "embed_tokens"),
    "missing head": (lambda p: edit(p, lambda t: t.pop("lm_head.weight")), CheckpointError, "lm_head"),
    "dense tensor of another shape": (lambda p: edit(p, lambda t: t.update({Q: torch.zeros(8, 8)})), CheckpointError, "q_proj"),
    "expert of another shape": (lambda p: edit(p, lambda t: t.update({E5: torch.zeros(8, 8)})), CheckpointError, "up_proj"),
    "missing shard": (lambda p: next(p.glob(SHARD)).unlink(), CheckpointError, "00003"),
    "truncated shard": (lambda p: os.truncate(next(p.glob(SHARD)), 9000), CheckpointError, "00003.*truncated"),
    "empty shard": (lambda p: os.truncate(next(p.glob(SHARD)), 0), CheckpointError, "00003"),
    "garbage": (lambda p: next(p.glob(SHARD)).write_bytes(os.urandom(5000)), CheckpointError, "00003"),
    "no config": (lambda p: (p / "config.json").unlink(), CheckpointError, "config.json"),
    "config is no JSON": (lambda p: (p / "config.json").write_text("{"), CheckpointError, "config.json"),
    "config is a list": (lambda p: (p / "config.json").write_text("[]"), CheckpointError, "config.json"),
    "config says nothing": (lambda p: (p / "config.json").write_text("{}"), ExpertFlowError, "model_type"),
    "unknown family": (lambda p: setting(p, model_type="gpt9"), ExpertFlowError, "gpt9"),
    "dense family": (lambda p: setting(p, model_type="llama", num_experts=...), UnsupportedModelError, "llama"),
    "encoder-decoder": (lambda p: setting(p, model_type="switch_transformers"), UnsupportedModelError, "switch"),
    "dbrx": (lambda p: setting(p, model_type="dbrx"), UnsupportedModelError, "dbrx"),
    "llama4": (lambda p: setting(p, model_type="llama4_text"), UnsupportedModelError, "llama4"),
    "packed": (lambda p: setting(p, quantization_config={"quant_method": "awq", "bits": 4}), UnsupportedModelError, "awq"),
    "odd quantisation": (lambda p: setting(p, quantization_config={"quant_method": "x"}), UnsupportedModelError, "'x'"),
    "more experts in the config": (lambda p: setting(p, num_experts=16), CheckpointError, "experts"),
    "fewer experts in the config": (lambda p: setting(p, num_experts=4), CheckpointError, "experts"),
    "more layers in the config": (lambda p: setting(p, num_hidden_layers=5), CheckpointError, "missing"),
    "odd width in the config": (lambda p: setting(p, hidden_size=128), CheckpointError, "shape"),
    "nonsense in the config": (lambda p: setting(p, hidden_size="wide"), ExpertFlowError, "config"),
    "generation config": (lambda p: (p / "generation_config.json").write_text("{"), CheckpointError, "JSON"),
    "no weights": (lambda p: tensors(p), CheckpointError, "safetensors"),
    "a pickle": (lambda p: (tensors(p), (p / "pytorch_model.bin").write_bytes(b"x")), CheckpointError, "pytorch_model.bin"),
    "empty folder": (lambda p: [f.unlink() for f in p.iterdir()], CheckpointError, "config.json"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_checkpoints(what, path):
    damage, kind, pattern = BROKEN[what]
    damage(path)
    with pytest.raises(kind) as e:
        load(path, budget="25%", preload=True)
    assert re.search(pattern, one_line(e)), str(e.value)


def test_no_such_model(tmp_path):
    for name in (tmp_path / "nothing", "no-such-model", "./x/y"):
        with pytest.raises(CheckpointError, match="neither a folder nor") as e:
            load(name)
        assert "smollm2-moe" in one_line(e)


@pytest.mark.parametrize("what", ["missing", "corrupt"])
def test_no_tokenizer(what, path, want):
    for f in path.glob("*token*"):
        f.unlink() if what == "missing" else f.write_text("{")
    with load(path) as flow:
        for use in (lambda: flow.tokenizer, lambda: flow.generate("x"), lambda: list(flow.stream("x"))):
            with pytest.raises(CheckpointError, match="tokenizer") as e:
                use()
            one_line(e)
        works(flow, want)


def test_bad_prompts(path):
    with load(path) as flow:
        for prompt in ("", [], None, 7, [{"role": "user"}], [{"content": "x"}], ["x"], {"role": "user", "content": "x"}):
            with pytest.raises(ExpertFlowError, match="prompt") as e:
                flow.generate(prompt, max_new_tokens=2)
            one_line(e)


@pytest.mark.parametrize(
    "key,value,pattern",
    [
        ("gpu_memry_budget", "6GB", "gpu_memory_budget"),
        ("io_thread", 1, "io_threads"),
        ("gpu_memory_budget", "six", "six"),
        ("gpu_memory_budget", "0%", "0"),
        ("gpu_memory_budget", "150%", "1.5"),
        ("eviction_policy", "lfuu", "lfu"),
        ("experts_implementation", "batched_mm", "grouped_mm"),
        ("device", "gpu9!", "gpu9!"),
        ("dtype", "int8", "int8"),
        ("context", 0, "context"),
        ("load_timeout", -1, "load_timeout"),
        ("strict", "maybe", "strict"),
    ],
)
def test_bad_settings(key, value, pattern, path):
    with pytest.raises(ConfigError) as e:
        ExpertFlow.from_pretrained(path, **{"context": 64, key: value})
    assert pattern in one_line(e)


def test_no_such_device(path):
    for device in ("cuda:7", "xpu", "nonsense"):
        with pytest.raises(ExpertFlowError) as e:
            ExpertFlow.from_pretrained(path, context=64, device=device)
        assert device.partition(":")[0] in one_line(e)


def test_a_pipe_among_the_shards(path):
    "Refused, not waited for."
    shard = sorted(path.glob("*.safetensors"))[0]
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        load(path)


def test_text_of_one_sequence_only(path):
    "Beams and several answers have no one stream of text: said at once, with what does have them."
    write_tokenizer(path)
    with load(path, "grouped_mm") as flow:
        for key in ("num_beams", "num_return_sequences"):
            with pytest.raises(ExpertFlowError, match=f"{key}=2: .* use flow.model.generate"):
                flow.generate("hello", max_new_tokens=2, **{key: 2})


# ---- errors and locks between the parts ----


@pytest.mark.parametrize("mode", MODES)
def test_budgets_from_a_prefetcher_and_another_thread(mode, path, want, monkeypatch):
    "Inside a layer-step it is refused, at the moment at which the other thread plans its own: neither waits for ever."
    with load(path, mode, "50%") as flow:
        planning, said, threads = threading.Event(), [], []
        plan_for, me = expertflow.flow.plan_for, threading.get_ident()

        def planned(*args):
            if threading.get_ident() != me:
                planning.set()
            return plan_for(*args)

        def prefetcher(layer, experts):
            if not threads:
                threads.append(threading.Thread(target=flow.set_budget, args=("25%",), daemon=True))
                threads[0].start()
                planning.wait(0.5)
                try:
                    flow.set_budget("100%")
                except ExpertFlowError as e:
                    said.append(str(e))
            return ()

        def work():
            nonlocal me
            me = threading.get_ident()
            got.append(generate(flow))

        monkeypatch.setattr(expertflow.flow, "plan_for", planned)
        flow.runtime.prefetcher, got = prefetcher, []
        generating = threading.Thread(target=work, daemon=True)
        generating.start()
        generating.join(20)
        assert threads and not generating.is_alive(), "two threads wait for each other"
        threads[0].join(20)
        assert not threads[0].is_alive() and planning.is_set()
        assert len(said) == 1 and "inside a layer-step" in said[0]
        assert flow.runtime.cache.n_slots == flow.plan.slots == 6 and flow.config.gpu_memory_budget == "25%"
        flow.runtime.prefetcher = None
        assert torch.equal(got[0], want[mode][1])
        works(flow, want, mode)


def test_the_first_error_wins(path, want, monkeypatch):
    "What goes wrong while the figures of a failed generation are gathered is told as well, not instead."
    flow, disk = broken(path, monkeypatch)
    with flow:
        note = flow.runtime.note

        def fails(wait=False):
            if flow.runtime.cache.count.steps:
                raise RuntimeError("the notes are lost")
            note(wait)

        monkeypatch.setattr(flow.runtime, "note", fails)
        with pytest.raises(LoadError, match="boom") as e:
            generate(flow)
        assert any("the notes are lost" in x for x in e.value.__notes__)
        assert flow.generations[-1].error == f"LoadError: {one_line(e)}"
        monkeypatch.setattr(flow.runtime, "note", note)
        disk.rule = None
        works(flow, want)
