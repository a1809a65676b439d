"The mover does what it is told, in any order and with a disk that fails: contents, priorities, hazards, memory."

import gc
import itertools
import random
import sys
import threading
import time
import warnings
from contextlib import contextmanager

import pytest
import torch
from faulty import Interrupt
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

import expertflow.mover
from expertflow.cache import Load
from expertflow.checkpoint import Checkpoint, ExpertStore
from expertflow.config import LoadError
from expertflow.mover import AcceleratorExecutor, Copies, CpuExecutor, HostSlots, Link, Slab, lend, let_go, resize_host, rows_for
from expertflow.testing import write_checkpoint

pytest_plugins = ["simdev.plugin"]
LAYERS, EXPERTS = 2, 8
KEYS = [(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    "In a fork torch makes its pool of threads anew, when it is first asked; that several ask at once is not foreseen."
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    size = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 96}
    return write_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"), dtype="bfloat16", **size)


@pytest.fixture
def store(path):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    mapping = get_model_conversion_mapping(model)
    store = ExpertStore(model, Checkpoint.open(path), LoadStateDictConfig(dtype=torch.bfloat16, weight_mapping=mapping))
    assert store.num_experts == [EXPERTS] * LAYERS
    store.want, store.log = {}, []
    for key in KEYS:
        buf = bytearray(store.slot_bytes)
        store.read_into(*key, memoryview(buf))
        store.want[key] = torch.frombuffer(buf, dtype=torch.uint8)
    yield store
    store.close()


def spy(store, rule=lambda key: None):
    "From now on `rule(key)` is called before each read of an expert, and reads are logged."
    read = type(store).read_into

    def read_into(layer, expert, buf):
        store.log.append((layer, expert))
        rule((layer, expert))
        return read(store, layer, expert, buf)

    store.read_into = read_into


@contextmanager
def moving(store, n_slots=6, device=CPU, *, host=6, most=None, segment=None, **kw):
    slab = Slab(n_slots, store.slot_bytes, device, most=most, segment=segment)
    ex = CpuExecutor(store, slab, **kw) if device.type == "cpu" else AcceleratorExecutor(store, slab, host, **kw)
    try:
        yield slab, ex
    finally:
        ex.close()
    threads = [t for w in ex.queues for t in w._threads]
    assert not any(t.is_alive() for t in threads)


def same(store, slab, slot, key):
    n = store.layout[store.layers[key[0]]].nbytes
    return torch.equal(slab[slot].cpu()[:n], store.want[key][:n])


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.0005)


def rests(ex):
    "Nothing is queued or held."
    until(lambda: not any(w._jobs or w._urgent for w in ex.queues))
    if isinstance(ex, AcceleratorExecutor):
        until(lambda: ex.host._held == 0)
        host = ex.host
        taken = [s.row for s in host._slots.values()]
        assert len(taken + host._free) == len(host.rows) and {*taken, *host._free} == {*host.rows}
        assert all(s.full for s in host._slots.values()) and not any(row.leaves for row in host.rows + host._aside)


# random schedules


class Driver:
    "Random calls, and what must be true after each."

    def __init__(self, store, slab, ex, seed):
        self.store, self.slab, self.ex, self.random = store, slab, ex, random.Random(seed)
        self.loading, self.there = {}, {}  # slot -> expert
        self.failed = self.sums = 0
        self.compute = []  # (what was computed from a slot, what it should be)

    def free(self):
        return [s for s in range(self.slab.n_slots) if s not in self.loading and s not in self.there]

    def start(self):
        away = set(KEYS) - set(self.loading.values()) - set(self.there.values())
        if not self.free():
            self.evict()
        if slots := self.free():
            slot, key = self.random.choice(slots), self.random.choice(sorted(away))
            self.slab.poison(slot)
            self.ex.used([slot])
            self.loading[slot] = key
            self.ex.start(Load(*key, slot), urgent=self.random.random() < 0.4)

    def evict(self):
        if self.there:
            del self.there[self.random.choice(sorted(self.there))]

    def promote(self):
        self.ex.promote(self.random.choice(range(self.slab.n_slots)))

    def cancel(self):
        if self.loading:
            slot = self.random.choice(sorted(self.loading))
            if self.ex.cancel(slot):
                del self.loading[slot]
                assert self.ex.ready(slot)

    def wait(self, slot=None):
        if not self.loading:
            return
        slot = self.random.choice(sorted(self.loading)) if slot is None else slot
        key = self.loading.pop(slot)
        try:
            self.ex.wait(slot)
        except (LoadError, OSError) as e:
            assert "boom" in str(e)
            self.failed += 1
            return
        assert self.ex.ready(slot)
        self.there[slot] = key
        self.use()

    def use(self):
        self.ex.begin()
        slots = self.random.sample(sorted(self.there), min(3, len(self.there)))
        for slot in slots:
            n = self.store.layout[self.store.layers[self.there[slot][0]]].nbytes
            self.compute.append((self.slab[slot][:n].clone(), self.store.want[self.there[slot]][:n]))
        self.ex.used(slots)

    def resize(self):
        n = self.random.randint(2, 12)
        for slot in [s for s in self.loading if s >= n]:
            if self.ex.cancel(slot):
                del self.loading[slot]
            else:
                self.wait(slot)
        for slot in [s for s in self.there if s >= n]:
            del self.there[slot]
        self.slab.resize(n)
        self.ex.resized(n)
        assert self.slab.n_slots == n

    def run(self, steps):
        calls = [self.start] * 8 + [self.wait] * 4 + [self.use] * 2 + [self.evict, self.promote, self.cancel] + [self.resize] * 1
        for _ in range(steps):
            self.random.choice(calls)()
            if len(self.compute) > 100:
                self.settle()
        while self.loading:
            self.wait()
        self.settle()
        for slot, key in self.there.items():
            assert same(self.store, self.slab, slot, key), (slot, key)
        rests(self.ex)
        m = self.ex.moved
        assert m.demand and m.prefetch and m.cancelled and self.failed

    def settle(self):
        for got, want in self.compute:
            assert torch.equal(got.cpu(), want)
        self.compute.clear()


def faults(seed):
    r, lock = random.Random(seed), threading.Lock()

    def rule(key):
        with lock:
            p = r.random()
        if p < 0.1:
            raise OSError(5, "boom")
        if p < 0.3:
            time.sleep(0.001)

    return rule


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("link", [None, 100e6])
def test_random_schedules(store, seed, threads, link):
    spy(store, faults(seed))
    with moving(store, most=12, n_threads=threads, link=link and Link(link), chunk_bytes=5000) as (slab, ex):
        Driver(store, slab, ex, seed).run(600)
        assert ex.paced == bool(link) and bool(ex.moved.chunks) == bool(link)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", ["pinned", "tiny", "paced", "pageable", "mixed"])
def test_random_schedules_on_a_device(sim, store, seed, how):
    "Contents are right, and no access is unordered, however the device dawdles."
    sim.configure(delay=0.0005, seed=seed, link=500e6)
    if how in ("pageable", "mixed"):
        sim.configure(pinned_capacity=0 if how == "pageable" else 3 * store.slot_bytes)
    spy(store, faults(seed))
    host = {"tiny": 3}.get(how, 8)
    link = Link(200e6) if how == "paced" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with moving(store, 6, torch.device("sim"), host=host, segment=4, link=link, chunk_bytes=5000) as (slab, ex):
            Driver(store, slab, ex, seed).run(300)
            m, c = ex.moved, sim.counters()
            assert (m.copies_pinned > 0) == (how != "pageable") and (m.copies_pageable > 0) == (how in ("pageable", "mixed"))
            assert c["bytes.h2d.pinned"] == m.bytes_pinned and c["bytes.h2d.pageable"] == m.bytes_pageable
    assert not sim.hazards(clear=False)


# who goes first


def both(body):
    "Two tests: on the CPU with a paced link, and on the simulated device."

    def on_cpu(store):
        body(store, CPU, link=Link(50e6))

    def on_device(sim, store):
        body(store, torch.device("sim"))

    on_cpu.__doc__ = on_device.__doc__ = body.__doc__
    globals()[f"test_{body.__name__}_cpu"], globals()[f"test_{body.__name__}_device"] = on_cpu, on_device


def pieces(ex, only_chunks=False):
    "Logs (slot, bytes, is it a chunk) of what is about to be copied; each then waits for the gate."
    log, gate, piece = [], threading.Event(), ex.piece

    def logged(move):
        n, chunk = piece(move)
        log.append((move.load.slot, n, chunk))
        if chunk or not only_chunks:
            assert gate.wait(20)
        return n, chunk

    ex.piece = logged
    return log, gate


def warm(store, ex, *keys):
    "Experts that are in the host tier, if there is one."
    for key in keys:
        ex.start(Load(*key, 0))
        ex.wait(0)


def queued(ex, slot):
    "The load stands in a queue to be copied."
    return any(job.load.slot == slot for job, _ in list(ex.queues[1]._jobs))


@both
def overtakes(store, device, **kw):
    "A demand load goes ahead of all prefetches, after at most the one chunk that is on its way. No clock: the order is logged."
    with moving(store, 6, device, chunk_bytes=2000, **kw) as (slab, ex):
        warm(store, ex, *KEYS[:5])
        log, gate = pieces(ex)
        for i in range(4):
            ex.start(Load(*KEYS[i], i), urgent=False)
        until(lambda: log)
        ex.start(Load(*KEYS[4], 4))
        if device.type == "cpu":
            until(lambda: queued(ex, 4))
        gate.set()
        ex.wait(4)
        assert same(store, slab, 4, KEYS[4])
        at = [slot for slot, *_ in log].index(4)
        assert at <= 1 and log[at] == (4, ex.nbytes[0], False)
        for i in range(4):
            ex.ready(i) or ex.wait(i)
            ex.wait(i)
            assert same(store, slab, i, KEYS[i])
        m = ex.moved
        assert m.overtaken == 1 and m.prefetch == 4 and m.demand == 6
        assert m.chunks == sum(chunk for *_, chunk in log) and sum(n for slot, n, _ in log if slot == 0) == ex.nbytes[0]
        rests(ex)


@both
def always_at_most_one_chunk(store, device, **kw):
    "The same at any moment, with nothing held up."
    with moving(store, 8, device, chunk_bytes=1000, host=16, **kw) as (slab, ex):
        warm(store, ex, *KEYS)
        log, gate = pieces(ex)
        gate.set()
        r = random.Random(1)
        for _ in range(20):
            keys = r.sample(KEYS, 5)
            for i in range(4):
                ex.start(Load(*keys[i], i), urgent=False)
            time.sleep(r.random() * 2e-3)
            seen = None
            if device.type == "cpu":  # the disk is no matter here: from when it has been read
                put = ex.queues[1].put

                def logged(job, step, put=put):
                    put(job, step)
                    log.append(("put", job.load.slot))

                ex.queues[1].put = logged
            begun = len(log)
            ex.start(Load(*keys[4], 4))
            seen = len(log)
            ex.wait(4)
            if device.type == "cpu":
                ex.queues[1].put = put
                seen = log.index(("put", 4), begun)
            at = next(i for i, x in enumerate(log) if i >= begun and x[:1] == (4,))
            assert sum(x[-1] is True for x in log[seen:at]) <= 1, log[seen:at]
            for i in range(4):
                ex.wait(i)
                assert same(store, slab, i, keys[i])
        rests(ex)


@both
def promotion(store, device, **kw):
    "A prefetch that turns out to be needed: what is left of it is moved at once, ahead of the others."
    with moving(store, 6, device, chunk_bytes=2000, **kw) as (slab, ex):
        warm(store, ex, *KEYS[:4])
        log, gate = pieces(ex)
        for i in range(4):
            ex.start(Load(*KEYS[i], i), urgent=False)
        until(lambda: log)
        first = log[0][0]
        if device.type == "cpu":
            until(lambda: queued(ex, 3))
        assert first == 0
        ex.promote(3)
        ex.promote(0)
        ex.promote(0)
        ex.promote(5)  # nothing there
        gate.set()
        for i in range(4):
            ex.wait(i)
            assert same(store, slab, i, KEYS[i])
        rest = ex.nbytes[0]
        assert log[0] == (0, 2000, True) and sorted(log[1:3]) == [(0, rest - 2000, False), (3, rest, False)]
        assert ex.moved.promoted in (2, 3, 4)  # whoever waits promotes too
        before = ex.moved.promoted
        ex.start(Load(*KEYS[0], 0), urgent=False)
        until(lambda: ex.ready(0))
        ex.wait(0)
        assert ex.moved.promoted == before, "it was there already"
        rests(ex)


@both
def cancelling(store, device, **kw):
    "Possible until the slot is being written, and then nothing ever will be."
    with moving(store, 6, device, chunk_bytes=2000, **kw) as (slab, ex):
        warm(store, ex, *KEYS[:3])
        log, gate = pieces(ex)
        slab.poison()
        ex.used(range(6))
        for i in range(4):  # the fourth one comes from disk: read, and waiting to be copied
            ex.start(Load(*KEYS[i], i), urgent=False)
        until(lambda: log and queued(ex, 3))
        assert not ex.cancel(0) and ex.cancel(5)
        if device.type == "cpu":
            until(lambda: queued(ex, 1))
        assert ex.cancel(1) and ex.cancel(3) and ex.ready(1) and ex.ready(3)
        before = slab[3].cpu()
        gate.set()
        ex.wait(0), ex.wait(1), ex.wait(2)
        until(lambda: not queued(ex, 3))
        assert same(store, slab, 0, KEYS[0]) and same(store, slab, 2, KEYS[2])
        assert torch.equal(slab[3].cpu(), before) and {slot for slot, *_ in log} == {0, 2}
        if device.type != "cpu":
            assert slab[1].eq(255).all() and slab[3].eq(255).all()
        assert ex.moved.cancelled == 2
        rests(ex)


@pytest.mark.parametrize("threads", [1, 2])
def test_reading_demand_first(store, threads):
    "On disk too: the next read is that of a demand load, and with two threads it need not wait for a prefetch under way."
    gate = threading.Event()
    spy(store, lambda key: key[0] == 0 and gate.wait(20))
    with moving(store, n_threads=threads) as (slab, ex):
        for i in range(3):
            ex.start(Load(0, i, i), urgent=False)
        until(lambda: store.log)
        ex.start(Load(1, 0, 3))
        ex.start(Load(1, 1, 4))
        if threads == 2:
            ex.wait(3), ex.wait(4)
            assert store.log == [(0, 0), (1, 0), (1, 1)]
        assert not ex.cancel(0) and ex.cancel(1)
        gate.set()
        for i in (3, 4, 0, 1, 2):
            ex.wait(i)
        assert store.log == [(0, 0), (1, 0), (1, 1), (0, 2)] and ex.moved.overtaken == 2
        assert all(same(store, slab, i, key) for i, key in ((0, (0, 0)), (2, (0, 2)), (3, (1, 0)), (4, (1, 1))))
        rests(ex)


def test_no_prefetch_is_read_beside_a_demand_load(store):
    gate = threading.Event()
    spy(store, lambda key: key[0] == 0 and gate.wait(20))
    with moving(store, n_threads=3) as (slab, ex):
        ex.start(Load(0, 0, 0))
        until(lambda: store.log)
        ex.start(Load(1, 0, 1), urgent=False)
        time.sleep(0.05)
        assert store.log == [(0, 0)]
        ex.promote(1)
        ex.wait(1)
        gate.set()
        ex.wait(0)
        assert same(store, slab, 0, (0, 0)) and same(store, slab, 1, (1, 0))


@both
def closing(store, device, **kw):
    "What is queued fails, and nobody hangs."
    with moving(store, 6, device, chunk_bytes=2000, **kw) as (_, ex):
        log, gate = pieces(ex)
        for i in range(6):
            ex.start(Load(*KEYS[i], i), urgent=i == 5)
        until(lambda: log)
        t = threading.Timer(0.05, gate.set)
        t.start()
        ex.close()
        t.join()
        ended = []
        for i in range(6):
            assert ex.ready(i)
            try:
                ex.wait(i)
                ended.append(i)
            except LoadError as e:
                assert "closed" in str(e)
        assert len(ended) < 6
        ex.start(Load(*KEYS[0], 0))
        with pytest.raises(LoadError, match="closed"):
            ex.wait(0)


# the host tier

def on_sim(store, n_slots=6, **kw):
    return moving(store, n_slots, torch.device("sim"), **kw)


def test_each_expert_is_read_once(sim, store):
    "A host tier with room for all; no pageable copy, no synchronisation of the thread that computes."
    spy(store)
    with on_sim(store, 4, host=len(KEYS)) as (slab, ex):
        before = sim.counters()
        for n in range(3 * len(KEYS)):
            ex.begin()
            ex.start(Load(*KEYS[n % len(KEYS)], n % 4), urgent=n % 3 > 0)
            ex.wait(n % 4)
            slab[n % 4].clone()
            ex.used([n % 4])
        after = sim.counters() - before
        assert sorted(store.log) == KEYS and after["syncs"] == 0
        m = ex.moved
        assert m.host_misses == len(KEYS) and m.host_hits == 2 * len(KEYS)
        assert m.copies_pinned == 3 * len(KEYS) and m.copies_pageable == after["copies.h2d.pageable"] == 0
        assert after["bytes.h2d.pinned"] == m.bytes_pinned == 3 * sum(ex.nbytes) * EXPERTS
        assert m.bytes_read == sum(store.disk_bytes(*key) for key in KEYS)


def test_smallest_host_tier(sim, store):
    "One host slot more than readers; everything urgent at once, three times over."
    with pytest.raises(ValueError, match="2 host slots for 2 reader threads"):
        AcceleratorExecutor(store, Slab(2, store.slot_bytes, torch.device("sim")), host_slots=2, n_threads=2)
    sim.configure(link=50e6, delay=0.0005)
    with on_sim(store, len(KEYS), host=3) as (slab, ex):
        for urgent in (True, False, True):
            for slot, key in enumerate(KEYS):
                ex.start(Load(*key, slot), urgent)
            for slot, key in enumerate(KEYS):
                ex.wait(slot)
                assert same(store, slab, slot, key)
        rests(ex)


def test_prefetches_leave_room(sim, store):
    "Prefetches that wait for the bus do not take the host slots that a demand load needs."
    with on_sim(store, 8, host=4, chunk_bytes=2000) as (slab, ex):
        log, gate = pieces(ex, only_chunks=True)
        for i in range(6):
            ex.start(Load(*KEYS[i], i), urgent=False)
        until(lambda: log and ex.host._held >= ex.host.spare)
        time.sleep(0.05)
        assert ex.host._held == ex.host.spare == 2 and not gate.is_set()
        ex.start(Load(*KEYS[6], 6))
        ex.start(Load(*KEYS[7], 7))
        ex.wait(6), ex.wait(7)
        assert same(store, slab, 6, KEYS[6]) and same(store, slab, 7, KEYS[7]) and ex.moved.overtaken == 2
        gate.set()
        for i in range(6):
            ex.wait(i)
            assert same(store, slab, i, KEYS[i])
        rests(ex)


def test_host_tensors(sim, store):
    "Stay as they are while in use, however much passes through the host tier; then they may go."
    n = store.slot_bytes
    with on_sim(store, 2, host=4) as (_, ex):
        with ex.host_tensor(*KEYS[0]) as t:
            assert t is None
        warm(store, ex, *KEYS[:2])
        with ex.host_tensor(*KEYS[0]) as a, ex.host_tensor(*KEYS[1]) as b, ex.host_tensor(*KEYS[0]) as c:
            assert a.is_pinned() and a.shape == (n,) and c is None, "two of four are lent at most: readers need the others"
            warm(store, ex, *KEYS[2:])
            assert torch.equal(a, store.want[KEYS[0]]) and torch.equal(b, store.want[KEYS[1]])
        del a, b
        warm(store, ex, *KEYS[2:])
        for key in KEYS[:2]:
            with ex.host_tensor(*key) as t:
                assert t is None
        with ex.host_tensor(*KEYS[-1]) as t:
            assert torch.equal(t, store.want[KEYS[-1]])
        rests(ex)
    with moving(store) as (_, ex), ex.host_tensor(0, 0) as t:
        assert t is None


def test_an_expert_that_is_being_read_is_not_read_twice(sim, store):
    "A load is cancelled while its expert is read, and started anew for another slot."
    gate = threading.Event()
    spy(store, lambda key: gate.wait(20))
    with on_sim(store) as (slab, ex):
        ex.start(Load(0, 0, 0))
        until(lambda: store.log)
        assert ex.cancel(0), "nothing has been written to the device"
        ex.start(Load(0, 0, 1))
        gate.set()
        ex.wait(1)
        assert same(store, slab, 1, (0, 0)) and store.log == [(0, 0)]
        rests(ex)


@pytest.mark.parametrize("limit", [0, 5, 10**6])
def test_refused_pin(sim, store, limit):
    "What cannot be pinned is ordinary memory: one warning, the same bytes, counted."
    sim.configure(pinned_capacity=limit * store.slot_bytes)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with on_sim(store, 4, host=16, chunk_bytes=3000) as (slab, ex):
            for n, key in enumerate(KEYS):
                ex.start(Load(*key, n % 4), urgent=n % 2 == 0)
                ex.wait(n % 4)
                assert same(store, slab, n % 4, key)
            m = ex.moved
            assert (m.copies_pageable > 0) == (limit < 16) and (m.copies_pinned > 0) == (limit > 0)
            assert sum(row.pinned for row in ex.host.rows) == min(16, 3 if limit == 5 else limit), "blocks are rounded up"
            rests(ex)
    texts = [str(w.message) for w in seen if w.category is RuntimeWarning]
    assert len(texts) == (limit < 16) and all("could not be pinned" in t and "B of" in t for t in texts)


# another size of the host tier


THREE = 2**17  # bytes of a block of three experts


@pytest.fixture
def threes(monkeypatch, store):
    "Host memory in blocks of three experts, as if they were large."
    monkeypatch.setattr(expertflow.mover, "block_bytes", lambda nbytes: THREE)
    assert THREE // store.slot_bytes == 3


def sized(ex, n):
    ex.resize_host(n, rows_for(ex.host, n))
    let_go(ex.host)
    assert len(ex.host.rows) == n == ex.host.spare + ex.n_readers


def pinned(*rows):
    "Bytes that the device says are pinned, if those of these rows are: a power of two for each block."
    blocks = {row.block: row.tensor.untyped_storage().nbytes() for row in rows if row.pinned}
    return sum(1 << (n - 1).bit_length() for n in blocks.values())


class Sizing(Driver):
    "The host tier changes its size, too, and experts in it are borrowed."
    borrowed = ()

    def start(self):
        super().start()
        if self.random.random() < 0.2:
            self.resize_host()

    def resize_host(self):
        sized(self.ex, self.random.randint(self.ex.n_readers + 1, len(KEYS)))
        self.give_back()
        self.borrowed = [(key, lend(self.ex.host, *key)) for key in self.random.sample(KEYS, 3)]

    def give_back(self):
        for key, lent in self.borrowed:
            assert lent is None or torch.equal(lent.tensor, self.store.want[key])
        self.borrowed = ()
        self.ex.readers.ring()

    def settle(self):
        super().settle()
        self.give_back()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", ["pinned", "pageable", "mixed"])
def test_random_schedules_while_the_host_tier_changes(sim, store, threes, seed, how):
    "It grows and shrinks among loads that fail, are called off, are late: contents, order, memory."
    sim.configure(delay=0.0005, seed=seed, link=300e6)
    if how != "pinned":
        sim.configure(pinned_capacity=0 if how == "pageable" else 2 * THREE)
    spy(store, faults(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with moving(store, 6, torch.device("sim"), host=8, segment=4, chunk_bytes=5000) as (slab, ex):
            Sizing(store, slab, ex, seed).run(700)
            m, c = ex.moved, sim.counters()
            assert (m.copies_pinned > 0) == (how != "pageable") and (m.copies_pageable > 0) == (how != "pinned")
            assert c["bytes.h2d.pinned"] == m.bytes_pinned and c["bytes.h2d.pageable"] == m.bytes_pageable
            for n in (len(KEYS), 3):
                sized(ex, n)
            rests(ex)
            gc.collect()  # errors of reading, which know where they were
            assert sim.counters()["memory.pinned"] == pinned(*ex.host.rows)
    assert not sim.hazards(clear=False)


@pytest.mark.parametrize("pin", [True, False])
def test_memory_goes_by_the_block(sim, store, threes, pin):
    "From the end; what is left of a block is used first when the tier grows, so nothing adds up however often."
    sim.configure(pinned_capacity=None if pin else 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with on_sim(store, 2, host=13) as (_, ex):
            host = ex.host
            warm(store, ex, *KEYS[:13])
            sized(ex, 12)
            blocks = [StorageWeakRef(row.tensor.untyped_storage()) for row in host.rows[::3]]
            gone = lambda: [b.expired() for b in blocks]
            pins = lambda n: sim.counters()["memory.pinned"] == (n * THREE if pin else 0)
            assert pins(4)
            for n, left in ((11, 4), (10, 4), (9, 3), (5, 2), (3, 1)):
                sized(ex, n)
                assert gone() == [i >= left for i in range(4)] and pins(left), n
            before = host.rows[0].block
            r = random.Random(0)
            for n in [r.randint(3, 16) for _ in range(60)]:
                sized(ex, n)
                assert len(host.rows) + len(host._aside) < n + 3 and not host._gone and host.rows[0].block == before
                warm(store, ex, *KEYS[: r.randint(1, 16)])
            rests(ex)


def test_held_and_lent_rows_leave_later(sim, store, threes):
    "Nobody else finds them, they stay as they are, and their memory goes when they are let go."
    with on_sim(store, 2, host=13) as (_, ex):
        host = ex.host
        warm(store, ex, *KEYS[:13])
        held, lent = host.have(*KEYS[11]), lend(host, *KEYS[8])
        refs = [StorageWeakRef(row.tensor.untyped_storage()) for row in (held.row, lent.row)]
        both = lambda: [ref.expired() for ref in refs]
        sized(ex, 3)
        assert [host.have(*KEYS[i]) for i in (8, 11)] == [None, None] and lend(host, *KEYS[11]) is None
        warm(store, ex, *KEYS)
        assert torch.equal(held.row.tensor, store.want[KEYS[11]]) and torch.equal(lent.tensor, store.want[KEYS[8]])
        assert both() == [False, False] and sim.counters()["memory.pinned"] == 3 * THREE
        assert host.release(held)
        del held
        let_go(host)
        assert both() == [True, False]
        del lent
        assert both() == [True, True] and sim.counters()["memory.pinned"] == THREE
        rests(ex)


def test_a_row_that_leaves_is_used_again(sim, store, threes):
    "Held while the tier shrinks, and let go when its block is in use: part of the tier that grows. Not while it is lent, too."
    with on_sim(store, 2, host=7) as (_, ex):
        host = ex.host
        warm(store, ex, *KEYS[:6])
        held, other, lent = host.have(*KEYS[4]), host.have(*KEYS[5]), lend(host, *KEYS[5])
        sized(ex, 4)
        assert host.release(held) and host._aside == [held.row] and not host.release(other)
        sized(ex, 6)
        assert held.row in host.rows and other.row not in host.rows and len({row.block for row in host.rows}) == 3  # 3, 2 of 3, 1
        warm(store, ex, *KEYS)
        assert torch.equal(lent.tensor, store.want[KEYS[5]])
        rests(ex)


def test_a_read_into_a_row_that_leaves(sim, store, threes):
    "Whoever reads it copies it; another load of the same expert does not wait for a row that nobody finds."
    gate = threading.Event()
    spy(store, lambda key: gate.wait(20) if store.log.count(key) == 1 else None)
    with on_sim(store, 3, host=6) as (slab, ex):
        keys = [ex.host.take(1, e) for e in range(3)]  # the rows that stay
        ex.start(Load(0, 0, 0))
        until(lambda: store.log)
        sized(ex, 3)
        for slot in keys:
            ex.host.release(slot)
        ex.start(Load(0, 0, 1))
        ex.wait(1)
        assert same(store, slab, 1, (0, 0)) and store.log == [(0, 0)] * 2 and not ex.ready(0)
        gate.set()
        until(lambda: sim.counters()["memory.pinned"] == THREE)  # also while nobody has asked for the load
        ex.wait(0)
        assert same(store, slab, 0, (0, 0))
        rests(ex)


def test_a_read_that_fails_into_a_row_that_leaves(sim, store, threes):
    "Nothing of it comes back, and who has read the same expert elsewhere keeps it."
    gate = threading.Event()

    def rule(key):
        if store.log.count(key) == 1:
            gate.wait(20)
            raise OSError(5, "boom")

    spy(store, rule)
    with on_sim(store, 3, host=6) as (slab, ex):
        kept = [ex.host.take(1, e) for e in range(3)]
        ex.start(Load(0, 0, 0))
        until(lambda: store.log)
        sized(ex, 3)
        for slot in kept:
            ex.host.release(slot)
        ex.start(Load(0, 0, 1))
        ex.wait(1)
        gate.set()
        with pytest.raises(OSError, match="boom"):
            ex.wait(0)
        ex.start(Load(0, 0, 0))
        ex.wait(0)
        assert same(store, slab, 0, (0, 0)) and store.log == [(0, 0)] * 2
        rests(ex)


def test_copies_end_before_memory_goes(sim, store, threes):
    with on_sim(store, 6, host=7) as (slab, ex):
        warm(store, ex, *KEYS[:6])
        sim.configure(link=500e3)  # some 0.07 s for an expert
        for i in range(6):
            ex.start(Load(*KEYS[i], i))
        for i in range(6):
            ex.tickets.wait(i)
        copies = [row.copied for row in ex.host.rows[3:6]]
        ex.resize_host(3, [])
        assert not any(c.query() for c in copies), "resizing itself waits for nothing"
        let_go(ex.host)
        assert all(c.query() for c in copies)
        for i in range(6):
            ex.wait(i)
            assert same(store, slab, i, KEYS[i])


def test_growing_lets_those_on_who_wait(sim, store, threes):
    "A prefetch for room, a reader for a row."
    with on_sim(store, 8, host=4, chunk_bytes=2000) as (slab, ex):
        log, gate = pieces(ex, only_chunks=True)
        for i in range(6):
            ex.start(Load(*KEYS[i], i), urgent=False)
        until(lambda: log and ex.host._held >= ex.host.spare)
        time.sleep(0.05)
        assert ex.host._held == 2
        sized(ex, 8)
        until(lambda: ex.host._held == 6)
        gate.set()
        for i in range(6):
            ex.wait(i)
            assert same(store, slab, i, KEYS[i])
        rests(ex)
    with on_sim(store, 2, host=3) as (slab, ex):
        held, waiting = [ex.host.take(0, e) for e in range(3)], ex.readers.submit(ex.host.take, 0, 3)
        time.sleep(0.05)
        assert not waiting.done()
        sized(ex, 4)
        for slot in [*held, waiting.result(20)]:
            ex.host.release(slot)
        rests(ex)


def test_sizes_that_cannot_be(sim, store, threes):
    with on_sim(store, 2, host=6) as (_, ex):
        for n, new in ((2, []), (0, []), (9, rows_for(ex.host, 8))):
            with pytest.raises(ValueError, match=f"{n} host slots, 2 reader threads, memory for 6"):
                resize_host(ex.host, n, new)
        assert len(ex.host.rows) == 6
        warm(store, ex, *KEYS)
        rests(ex)


# every wait is needed: without it the checker finds a hazard


def churn(store, sim, host=4, n=60):
    "Experts come, are computed with, and go."
    r = random.Random(0)
    with on_sim(store, 3, host=host, chunk_bytes=2000) as (slab, ex):
        for i in range(n):
            ex.begin()
            slot = i % 3
            ex.start(Load(*r.choice(KEYS), slot), urgent=i % 4 > 0)
            ex.wait(slot)
            slab[slot] + 1
            ex.used([slot])
        torch.accelerator.synchronize()
    return {h.kind for h in sim.hazards()}


def test_nothing_is_unordered(sim, store):
    sim.configure(delay=0.0005, link=200e6)
    assert churn(store, sim) == set()


def test_without_waiting_for_ready(sim, store, monkeypatch):
    monkeypatch.setattr(Copies, "wait", lambda self, slot: None)
    assert "read before ready" in churn(store, sim)


def test_without_marking_what_is_used(sim, store, monkeypatch):
    monkeypatch.setattr(Copies, "used", lambda self, slots: None)
    assert "overwritten while read" in churn(store, sim)


def test_without_waiting_for_copies_out_of_the_host_tier(sim, store, monkeypatch):
    vacant = HostSlots._vacant

    def forgetful(self, key):
        slot = vacant(self, key)
        if slot is not None:
            slot.row.copied = None
        return slot

    monkeypatch.setattr(HostSlots, "_vacant", forgetful)
    sim.configure(link=20e6)
    assert "staging reused" in churn(store, sim, host=3)


def test_a_prefetch_into_a_slot_in_use_holds_nobody_up(sim, store):
    "It waits for its slot outside the copy stream, in which a demand load would have to wait behind it."
    with on_sim(store, 3, host=16) as (slab, ex):
        warm(store, ex, *KEYS[:3])
        torch.accelerator.synchronize()
        sim.configure(op_time=0.5)
        slab[0] + 1
        ex.used([0])
        end = torch.accelerator.current_stream().record_event()
        ex.start(Load(*KEYS[1], 0), urgent=False)
        until(lambda: not ex.queues[1]._jobs)
        ex.start(Load(*KEYS[2], 1))
        ex.tickets.wait(1)
        ex.copies._ready[1].synchronize()
        assert not end.query(), "the demand load has waited for the computation"
        sim.configure(op_time=0)
        ex.wait(0), ex.wait(1)
        assert same(store, slab, 0, KEYS[1]) and same(store, slab, 1, KEYS[2])


def test_two_streams(sim, store):
    "The model may be called on another stream than the last time."
    sim.configure(delay=0.001, link=200e6)
    streams = [torch.accelerator.current_stream(), torch.Stream("sim"), torch.Stream("sim")]
    with on_sim(store, 3) as (slab, ex):
        for i in range(30):
            with streams[i % 3]:
                ex.begin()
                slot = i % 2
                ex.start(Load(*KEYS[i % 16], slot))
                ex.wait(slot)
                got = slab[slot].clone()
                ex.used([slot])
                assert torch.equal(got.cpu(), store.want[KEYS[i % 16]])
        assert slab.streams == [ex.copies.stream, streams[2]]


@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize("waits", [True, False])
def test_shrinking_after_many_streams(sim, store, monkeypatch, n, waits):
    "Two streams are enough to know when nothing uses the slots any more, since each one has waited for the one before."

    def begin(self):
        self.compute = torch.accelerator.current_stream()
        self.slab.streams = [self.stream, self.compute]

    if not waits:
        monkeypatch.setattr(Copies, "begin", begin)
    with on_sim(store, 4, segment=2, host=8) as (slab, ex):
        for slot in range(4):
            ex.start(Load(*KEYS[slot], slot))
            ex.wait(slot)
        torch.accelerator.synchronize()
        sim.configure(op_time={"aten::add": 0.02})
        sums = []
        for _ in range(n):
            with torch.Stream("sim"):
                ex.begin()
                sums.append(slab[3] + 0)
                ex.used([3])
        with torch.Stream("sim"):
            ex.begin()
            assert len(slab.streams) == 2
            slab.resize(2)
            ex.resized(2)
        fresh = [torch.zeros(2, store.slot_bytes, dtype=torch.uint8, device="sim") for _ in range(4)]
        kinds = {h.kind for h in sim.hazards()}
        torch.accelerator.synchronize()
        if waits:
            assert not kinds and all(torch.equal(s.cpu(), store.want[KEYS[3]]) for s in sums)
        else:
            assert "missing record_stream" in kinds
        assert not any(x.any() for x in fresh)
        sim.hazards()


@pytest.mark.parametrize("careful", [True, False])
def test_shrinking_waits_for_the_streams(sim, store, careful):
    "Memory of slots that go is given to others when copies into it and computations with it are through."
    sim.configure(op_time=0.02, link=20e6)
    device, nbytes = torch.device("sim"), store.slot_bytes
    start = sim.counters()["memory.allocated"]
    with on_sim(store, 8, segment=2, host=8) as (slab, ex):
        assert slab.allocated == 8 * nbytes and sim.counters()["memory.allocated"] - start >= slab.allocated
        other = torch.Stream("sim")
        for slot in range(8):
            ex.start(Load(*KEYS[slot], slot), urgent=True)
        for slot in range(8):
            ex.wait(slot)
        other.wait_stream(torch.accelerator.current_stream())
        with other:
            ex.begin()
            sums = [slab[slot] + 0 for slot in range(8)]
            ex.used(range(8))
        if not careful:
            slab.streams.clear()
        slab.resize(3)
        ex.resized(3)
        assert slab.allocated == 4 * nbytes and slab.n_slots == 3
        fresh = torch.zeros(2, nbytes, dtype=torch.uint8, device=device)  # takes the memory that is free
        with pytest.raises(IndexError):
            slab[3]
        torch.accelerator.synchronize()
        assert all(torch.equal(s.cpu(), store.want[KEYS[slot]]) for slot, s in enumerate(sums)) or not careful
        assert {h.kind for h in sim.hazards()} == (set() if careful else {"missing record_stream"})
        assert all(same(store, slab, slot, KEYS[slot]) for slot in range(3)) and not fresh.any()
        slab.resize(7)
        ex.resized(7)
        assert all(same(store, slab, slot, KEYS[slot]) for slot in range(3))
        ex.start(Load(*KEYS[9], 6))
        ex.wait(6)
        assert same(store, slab, 6, KEYS[9])
        sim.hazards()


def test_no_room_to_grow(sim, store):
    "An allocation that is refused leaves the slab as it was."
    sim.configure(capacity=sim.counters()["memory.allocated"] + 6 * store.slot_bytes)
    slab = Slab(2, store.slot_bytes, torch.device("sim"), segment=2)
    with pytest.raises(torch.OutOfMemoryError):
        slab.resize(20)
    assert slab.n_slots == 2 and slab.allocated == 2 * store.slot_bytes
    slab.resize(4)
    assert slab.block(2, 2) is not None


# the timeline


def test_timeline_of_a_device(sim, store):
    sim.configure(link=10e6)
    with on_sim(store, 4, chunk_bytes=4000) as (_, ex):
        warm(store, ex, KEYS[0])
        ex.timeline = []
        t = time.perf_counter()
        ex.start(Load(*KEYS[1], 1), urgent=False)
        ex.wait(1)
        ex.start(Load(*KEYS[0], 0))
        ex.wait(0)
        chunks = -(-ex.nbytes[0] // 4000)
        until(lambda: len(ex.timeline) >= 3)
        torch.accelerator.synchronize()
        until(lambda: sum(end - start for kind, *_, start, end in ex.timeline if kind == "copy") > 1.5 * ex.nbytes[0] / 10e6)
        assert [x[:3] for x in ex.timeline if x[0] == "read"] == [("read", *KEYS[1])]
        copies = [x for x in ex.timeline if x[0] == "copy"]
        assert {x[1:3] for x in copies} == set(KEYS[:2]) and len(copies) <= chunks + 1
        spans = sorted(x[3:] for x in ex.timeline)
        assert all(t <= a < b for a, b in spans) and all(b <= c + 1e-3 for (_, b), (c, _) in itertools.pairwise(spans))


# Ctrl-C


@both
def interrupted_anywhere(store, device, **kw):
    "Whatever a call was doing: cancel or wait put things in order, and nothing is held or written any more."
    with moving(store, 4, device, chunk_bytes=2000, host=6, **kw) as (slab, ex):

        def some(ex=ex):
            for slot in range(4):
                ex.start(Load(*KEYS[slot], slot), urgent=slot % 2 == 0)
            ex.promote(1)
            ex.cancel(3)
            with ex.host_tensor(*KEYS[0]) as t:
                assert t is None or len(t)
            for slot in range(3):
                ex.wait(slot)
            ex.used(range(3))

        n, ended, before = 0, False, sys.gettrace()
        while not ended:
            n += 1
            slab.poison()
            ex.used(range(4))
            sys.settrace(Interrupt(n, expertflow.mover))
            try:
                some()
                ended = True
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            for slot in range(4):
                if not ex.cancel(slot):
                    ex.wait(slot)
                    assert same(store, slab, slot, KEYS[slot])
            for slot in range(4):
                ex.start(Load(*KEYS[slot + 4], slot))
            for slot in range(4):
                ex.wait(slot)
                assert same(store, slab, slot, KEYS[slot + 4]), n
            assert not ex.tickets._open
        assert n > 60
        until(lambda: not any(w._jobs for w in ex.queues))
        rests(ex)
        if device.type != "cpu":
            assert not ex.host._lent
