"The mover does what it is told, in any order and with a disk that fails: contents, priorities, hazards, memory."

import random
import threading
import time
import warnings
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig

from expertflow.cache import Load
from expertflow.checkpoint import Checkpoint, ExpertStore
from expertflow.config import LoadError
from expertflow.mover import AcceleratorExecutor, CpuExecutor, Link, Slab
from expertflow.testing import write_checkpoint

pytest_plugins = ["simdev.plugin"]
LAYERS, EXPERTS = 2, 8
KEYS = [(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)]
CPU = torch.device("cpu")


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
    assert not any(w._jobs or w._urgent for w in ex.queues)
    if isinstance(ex, AcceleratorExecutor):
        until(lambda: ex.host._held == 0)
        host = ex.host
        taken = [s.index for s in host._slots.values()]
        assert sorted(taken + host._free) == list(range(len(host.rows))) and all(s.full for s in host._slots.values())


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
