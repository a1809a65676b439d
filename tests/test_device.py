"""The device path on the simulated accelerator: the CPU's bits, no hazard, no pageable copy, however late things are.

Every copy and every op starts late by a random time, slots are poisoned with NaN before each load, and the checker of the
simulated device looks for orders that nobody has asked for. The reference is the resident model on the CPU.
"""

import itertools
import random
import threading

import pytest
import torch
from faulty import Disk, books_of_a_retry
from transformers import AutoModelForCausalLM

import expertflow.flow
import expertflow.mover
from expertflow.cache import balance, check
from expertflow.config import BudgetError, LoadError
from expertflow.flow import ExpertFlow
from expertflow.testing import write_checkpoint

pytest_plugins = ["simdev.plugin"]
EAGER = {"attn_implementation": "eager"}  # torch picks other kernels for sdpa on an accelerator
CORE = ["olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe",
        "granitemoeshared", "glm4_moe", "dots1", "flex_olmo", "minimax"]  # fmt: skip


def resident(path, mode="grouped_mm"):
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", experts_implementation=mode, **EAGER).eval()
    for p in model.parameters():
        p.data = p.data.clone()  # views into the file are not aligned, what is on a device is
    return model


def offloaded(path, budget="0.001%", host="100%", **kw):
    settings = {"gpu_memory_budget": budget, "cpu_memory_budget": host, "context": 512, "batch": 3, "system_reserve": "1MB"} | kw
    flow = ExpertFlow.from_pretrained(path, model_kwargs=EAGER, **settings)
    assert flow.device.type == "sim"
    flow.runtime.poison = True
    for slot in flow.runtime.cache.free:
        flow.runtime.slab.poison(slot)
        flow.runtime.executor.used([slot])
    return flow


def prompt(vocab, n=33, batch=1):
    return torch.randint(3, vocab, (batch, n), generator=torch.Generator().manual_seed(n + batch))


def decode(model, ids, n):
    length = {"min_new_tokens": n, "max_new_tokens": n, "do_sample": False}
    out = model.generate(ids, **length, output_logits=True, return_dict_in_generate=True)
    return out.sequences.cpu(), torch.stack(out.logits).cpu().nan_to_num()


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", CORE)
def test_equal_bits(sim, tmp_path, family, dtype):
    "Two prompt lengths and batches, then decoding, with a host tier that has to go to disk; everything late by up to 0.2 ms."
    path = write_checkpoint(family, tmp_path, dtype=dtype)
    runs = [("grouped_mm", "100%"), ("grouped_mm", "0.001%"), ("eager", "0.001%")]
    if family in ("olmoe", "deepseek_v3", "gpt_oss"):
        runs += [("grouped_mm", "50%"), ("grouped_mm", "25%"), ("eager", "100%"), ("eager", "50%"), ("eager", "25%")]
    for mode in ("grouped_mm", "eager"):
        ref = resident(path, mode)
        cases = [prompt(ref.config.vocab_size, n, b) for n, b in ((33, 1), (70, 3))]
        with torch.no_grad():
            expected = [ref(x).logits for x in cases]
        tokens = decode(ref, cases[0], 8)
        for i, budget in enumerate(b for m, b in runs if m == mode):
            sim.configure(delay=0.0002, seed=i)
            with offloaded(path, budget, "30%", experts_implementation=mode, preload=bool(i % 2)) as flow, torch.no_grad():
                for x, want in zip(cases, expected, strict=True):
                    got = flow.model(x.to("sim")).logits.cpu()
                    assert torch.equal(got.nan_to_num(), want.nan_to_num()), (mode, budget, x.shape)
                assert same(decode(flow.model, cases[0].to("sim"), 8), tokens), (mode, budget)
            assert not sim.hazards(), (mode, budget)


@pytest.fixture
def olmoe(tmp_path):
    path = write_checkpoint("olmoe", tmp_path, dtype="bfloat16")
    ref = resident(path)
    return path, ref, prompt(ref.config.vocab_size)


class Guesser:
    "Guesses for the next layers: `right` knows the routing of the run before, else it names experts that are not used."

    def __init__(self, rt, seen, right, ahead):
        self.rt, self.seen, self.right, self.ahead, self.step = rt, seen, right, ahead, 0
        self.most_idle = 0  # slots that were free, or neither pinned nor being filled, when it was asked

    def __call__(self, layer, experts):
        layers, cache = len(self.rt.cache.num_experts), self.rt.cache
        self.most_idle = max(self.most_idle, int(((cache.pins == 0) & ~cache.loading).sum()))
        self.step += 1
        for d in range(1, self.ahead + 1):
            if self.step - 1 + d < len(self.seen):
                at, used = self.seen[self.step - 1 + d]
                yield at, used if self.right else [e for e in range(self.rt.cache.num_experts[at]) if e not in used][:4]
            else:
                yield (layer + d) % layers, [0, 1]


def routing(flow, ids, n):
    "Layers and experts of all layer-steps of a generation."
    seen, begin = [], flow.runtime.cache.begin

    def noted(layer, experts):
        experts = list(experts)
        seen.append((layer, experts))
        return begin(layer, experts)

    flow.runtime.cache.begin = noted
    out = decode(flow.model, ids, n)
    flow.runtime.cache.begin = begin
    return seen, out


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("budget,ahead", [("40%", 2), ("25%", 1), ("0.001%", 1)])
def test_prefetching_changes_nothing(sim, olmoe, budget, ahead, right):
    "200 decode steps with a prefetcher that knows what comes, and with one that is always wrong."
    path, ref, ids = olmoe
    want = decode(ref, ids, 200)
    sim.configure(delay=0.0001, link=2e9)
    with offloaded(path, budget, "60%", eviction_policy="lru") as flow:  # else a whole layer may stay, which nobody then begins
        seen, plain = routing(flow, ids.to("sim"), 200)
        assert same(plain, want)
        count = flow.runtime.cache.count
        assert count.prefetched == 0
        flow.runtime.prefetcher = guesser = Guesser(flow.runtime, seen, right, ahead)
        assert same(decode(flow.model, ids.to("sim"), 200), want)
        used = count.in_time + count.late
        assert balance(flow.runtime.cache) == 0 and guesser.step == len(seen)
        if budget == "0.001%":  # whenever it is asked, the layer-step holds all slots
            assert guesser.most_idle == 0 and count.prefetched == 0 and flow.runtime.cache.n_slots == flow.plan.min_slots
        else:
            assert guesser.most_idle > 0 and count.prefetched > len(seen) / 4, count
            assert used > 0.5 * count.prefetched if right else count.wasted + count.cancelled > 0.5 * count.prefetched, count


@pytest.mark.parametrize("times", [1, 2])
def test_a_prefetch_fails_when_it_is_waited_for(sim, olmoe, monkeypatch, times):
    "The layer-step that needs the expert reads it itself. If that fails, too, it is an error."
    path, ref, ids = olmoe
    with offloaded(path, "50%", preload=False) as flow, torch.no_grad():
        disk = Disk(flow, monkeypatch)
        disk.break_when_waited_for(flow, monkeypatch, 0, 3, times)
        assert flow.runtime.prefetch(0, [3]) == 1
        if times == 1:
            assert torch.equal(flow.model(ids.to("sim")).logits.cpu(), ref(ids).logits)
            books_of_a_retry(flow, disk, 0, 3)
        else:
            with pytest.raises(LoadError, match=r"expert 3 of model.layers.0"):
                flow.model(ids.to("sim"))
            assert disk.log.count((0, 3)) == 2
        assert same(decode(flow.model, ids.to("sim"), 4), decode(ref, ids, 4))
        assert balance(flow.runtime.cache) == 0


def test_guesses_and_faults_at_random(sim, olmoe, monkeypatch):
    "Whatever becomes of a prefetch is in the books, also when layer-steps break off."
    path, ref, ids = olmoe
    sim.configure(delay=0.0002, link=50e6)
    r, dice, ended = random.Random(0), random.Random(1), {True: 0, False: 0}
    with offloaded(path, "25%", "30%", preload=False) as flow, torch.no_grad():
        rt, disk = flow.runtime, Disk(flow, monkeypatch)

        def rule(at):
            if dice.random() < 0.003:
                raise OSError(5, "boom")

        def prefetcher(layer, experts):
            for _ in range(r.randrange(3)):
                yield r.randrange(3), r.sample(range(8), r.randrange(1, 5))
            if r.random() < 0.02:
                raise ValueError("no guess")

        disk.rule, rt.prefetcher = rule, prefetcher
        for i in range(60):
            try:
                flow.model(ids[:, : 1 + 13 * (i % 3)].to("sim"))
                ended[True] += 1
            except (LoadError, ValueError):
                ended[False] += 1
            check(rt.cache)
            assert balance(rt.cache) == 0, (i, rt.cache.count)
        c = rt.cache.count
        assert min(ended.values()) > 3 and min(c.in_time + c.late, c.wasted, c.cancelled) > 0, (ended, c)
        disk.rule = rt.prefetcher = None
        assert same(decode(flow.model, ids.to("sim"), 4), decode(ref, ids, 4))


@pytest.mark.parametrize("mode", ["grouped_mm", "eager"])
def test_budget_changes_while_it_generates(sim, tmp_path, mode):
    "Grow, shrink to the minimum, back, every few tokens; and what was given back is free on the device."
    path = write_checkpoint("qwen3_moe", tmp_path, dtype="bfloat16")
    ref = resident(path, mode)
    ids = prompt(ref.config.vocab_size)
    want = decode(ref, ids, 60)
    sim.configure(delay=0.0001)
    with offloaded(path, "50%", experts_implementation=mode) as flow:
        budgets, slots = itertools.cycle(["100%", "0.001%", "50%", "25%", "0.001%", "75%"]), set()
        flow.runtime.prefetcher = lambda layer, experts: [((layer + 1) % len(flow.runtime.cache.num_experts), range(4))]

        class Change(torch.nn.Module):
            n = 0

            def __call__(self, input_ids, scores):
                self.n += 1
                if self.n % 4 == 0:
                    flow.set_budget(next(budgets))
                    slots.add(flow.runtime.cache.n_slots)
                return scores

        out = flow.model.generate(ids.to("sim"), do_sample=False, min_new_tokens=60, max_new_tokens=60, output_logits=True,
                                  return_dict_in_generate=True, logits_processor=[Change()])  # fmt: skip
        assert same((out.sequences.cpu(), torch.stack(out.logits).cpu().nan_to_num()), want)
        assert len(slots) == 5 and min(slots) == flow.plan.min_slots


@pytest.mark.parametrize("how", ["auto", "never"])
@pytest.mark.parametrize("who", ["itself", "another thread"])
def test_the_host_tier_changes_while_it_generates(sim, olmoe, who, how):
    "The bits of the resident model, and what was given back is nobody's."
    path, ref, ids = olmoe
    want = decode(ref, ids, 60)
    sim.configure(delay=0.0001, link=20e6 if how == "auto" else None)
    with offloaded(path, "25%", host_compute=how) as flow:
        shares, sizes, stop = itertools.cycle(["20%", "100%", "40%", "25%", "75%"]), set(), threading.Event()
        flow.runtime.prefetcher = lambda layer, experts: [((layer + 1) % len(flow.runtime.cache.num_experts), range(4))]

        def change():
            flow.set(cpu_memory_budget=next(shares))
            n, held = len(flow.runtime.executor.host.rows), flow.ledger.held("host", "expert cache")
            assert held == flow.ledger.capacity("host") == n * flow.plan.slot_bytes and n == flow.host_slots
            sizes.add(n)

        def changes():
            while not stop.is_set():
                change()

        class After(torch.nn.Module):
            def __call__(self, input_ids, scores):
                if who == "itself":
                    change()
                return scores

        other = threading.Thread(target=changes, daemon=True)
        if who != "itself":
            other.start()
        out = flow.model.generate(ids.to("sim"), do_sample=False, min_new_tokens=60, max_new_tokens=60, output_logits=True,
                                  return_dict_in_generate=True, logits_processor=[After()])  # fmt: skip
        stop.set()
        if who != "itself":
            other.join(20)
            assert not other.is_alive()
        assert same((out.sequences.cpu(), torch.stack(out.logits).cpu().nan_to_num()), want)
        total = flow.plan.total_experts
        assert sizes == {round(x * total) for x in (0.2, 0.25, 0.4, 0.75, 1)} and flow.generations[-1].changes >= 5
        assert balance(flow.runtime.cache) == 0


def books(flow):
    return flow.settings.now, flow.host_slots, flow.plan, flow.ledger.snapshot(), list(flow.runtime.executor.host.rows)


def test_a_host_budget_that_cannot_be(sim, olmoe, monkeypatch):
    "Too small, too large, or the system gives less than it said: all stays as it was, and nothing is left of what was made."
    path, ref, ids = olmoe
    want = decode(ref, ids, 4)
    monkeypatch.setattr(expertflow.mover, "block_bytes", lambda nbytes: 2**14)
    with offloaded(path, "50%", "30%") as flow:
        before, pinned, size = books(flow), sim.counters()["memory.pinned"], flow.plan.slot_bytes

        def refused(match, **more):
            with pytest.raises(BudgetError, match=match):
                flow.set(**{"cpu_memory_budget": "100%", "eviction_policy": "lru"} | more)
            assert books(flow) == before and sim.counters()["memory.pinned"] == pinned

        refused("the host tier needs at least .* .3 experts.", cpu_memory_budget=f"{2 * size}B")
        refused("it needs at least", gpu_memory_budget="1MB")
        monkeypatch.setattr(expertflow.flow, "memory_available", lambda: 3 * size)
        refused(r"24 experts on the host take .* more than now, .* are free .too little.; lower it, or close other programs")
        monkeypatch.setattr(expertflow.flow, "memory_available", lambda: 100 * size)
        sim.configure(pinned_capacity=pinned + 2**14)

        def full(nbytes):
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(expertflow.mover, "huge_pages", full)
        with pytest.warns(RuntimeWarning, match="could not be pinned"):
            refused(r"24 experts on the host take .* Cannot allocate memory")
        monkeypatch.undo()
        sim.configure(pinned_capacity=None)
        assert same(decode(flow.model, ids.to("sim"), 4), want)


def test_a_host_budget_beside_one_that_fails_late(sim, olmoe, monkeypatch):
    "When the slots cannot grow between two layer-steps, the memory made for the host tier goes."
    path, ref, ids = olmoe
    with offloaded(path, "50%", "30%") as flow:
        before, pinned = books(flow), sim.counters()["memory.pinned"]

        def full(n):
            assert sim.counters()["memory.pinned"] > pinned
            raise MemoryError("no more")

        with monkeypatch.context() as m:
            m.setattr(flow.runtime.slab, "resize", full)
            with pytest.raises(MemoryError):
                flow.set(cpu_memory_budget="100%", gpu_memory_budget="100%")
        assert books(flow) == before and sim.counters()["memory.pinned"] == pinned
        flow.set(cpu_memory_budget="100%", gpu_memory_budget="100%")
        assert flow.host_slots == flow.plan.slots == 24 and same(decode(flow.model, ids.to("sim"), 4), decode(ref, ids, 4))


def test_an_automatic_host_budget_counts_its_own_memory(sim, olmoe, monkeypatch):
    "Half of what is free and of what it has itself; and the same setting again changes nothing, whatever is free then."
    with offloaded(olmoe[0], "50%", "75%") as flow:
        size = flow.plan.slot_bytes
        monkeypatch.setattr(expertflow.flow, "memory_available", lambda: 4 * size)
        assert flow.host_slots == 18
        flow.set(cpu_memory_budget="auto")
        assert flow.host_slots == (4 + 18) // 2
        flow.set(cpu_memory_budget="auto", eviction_policy="lru")
        assert flow.host_slots == 11


def test_whole_layers_run_without_a_wait(sim, olmoe):
    "All experts resident: no host sync between the router and the next token; with half of them, one a layer."
    path, ref, ids = olmoe
    want = decode(ref, ids, 24)
    per_token = {}
    for budget in ("100%", "50%"):
        with offloaded(path, budget) as flow:
            decode(flow.model, ids.to("sim"), 4)  # everything has been loaded, compiled, seen
            x = ids[:, :1].to("sim")
            torch.accelerator.synchronize()
            start = sim.counters()
            with torch.no_grad():
                for _ in range(5):
                    flow.model(x)
            now = sim.counters()
            per_token[budget] = (now["syncs"] - start["syncs"]) / 5
            assert now["copies.h2d.pageable"] == start["copies.h2d.pageable"]
            assert same(decode(flow.model, ids.to("sim"), 24), want)
    layers = ref.config.num_hidden_layers
    assert per_token["100%"] == 0 and per_token["50%"] <= layers, per_token


def test_whole_layers_on_many_streams(sim, olmoe):
    "Nothing that the layers keep on the device is given up while a stream may still read it."
    path, ref, ids = olmoe
    sim.configure(delay=0.0005)
    with offloaded(path, "100%") as flow, torch.no_grad():
        cache, x, want = flow.runtime.cache, ids.to("sim"), ref(ids).logits
        got, seen = [], set()
        torch.accelerator.synchronize()
        for i in range(12):
            with torch.Stream("sim"):
                got.append(flow.model(x).logits)
            seen |= {where.data_ptr() for _, where in flow.runtime._tables.values()}
            if i % 3 == 1:  # two experts of a layer change places, and so its table
                for e in (i % 8, (i + 3) % 8):
                    slot = cache.slot_of[i % 2][e]
                    cache.drop(slot)
                    cache.free.append(slot)
        torch.accelerator.synchronize()
        assert all(torch.equal(x.cpu(), want) for x in got)
        assert len(flow.runtime.slab.streams) == 2 and len(seen) > len(flow.runtime.layouts)


def test_a_table_that_is_replaced(sim, olmoe):
    "Its memory is not given to others while a stream may still read it."
    sim.configure(op_time={"aten::add": 0.02})
    with offloaded(olmoe[0], "100%") as flow:
        rt, row, got = flow.runtime, flow.runtime.cache.slot_of[0], []
        for _ in range(3):
            with torch.Stream("sim"):
                rt.executor.begin()
                slots, where = rt.table(0)
                got.append((where + 0, [s - rt.slab.segment_of(s)[0] for s in slots]))
        row[0], row[1] = row[1], row[0]
        rt.cache.owner[row] = range(len(row))
        del where
        with torch.Stream("sim"):
            rt.executor.begin()
            got.append((rt.table(0)[1] + 0, [s - rt.slab.segment_of(s)[0] for s in row]))
        torch.accelerator.synchronize()
        assert all(a.tolist() == b for a, b in got) and got[-1][1] != got[0][1]


def test_uses_are_counted_without_waiting(sim, olmoe):
    "The hits of layers that ran without the host are those that the host would have counted."
    path, ref, ids = olmoe
    with offloaded(path, "100%") as flow:
        decode(flow.model, ids.to("sim"), 10)
        run = flow.generations[-1]
    k, layers = ref.config.num_experts_per_tok, ref.config.num_hidden_layers
    assert run.misses == 0 and run.hits >= 9 * k * layers  # nine decode steps of one row, and a prompt
    assert flow.runtime.cache.count.steps == 10 * layers


@pytest.mark.parametrize("how", ["auto", "always"])
def test_the_host_computes_misses(sim, olmoe, how):
    "Misses that are in the host tier are not moved over a slow link; on this device even the bits are the host's. Never unasked."
    path, ref, ids = olmoe
    want = decode(ref, ids, 30)
    loads = {}
    for setting in ("never", how):
        sim.configure(delay=0.0001, link=1e7)
        with offloaded(path, "25%", host_compute=setting) as flow:
            assert same(decode(flow.model, ids.to("sim"), 30), want)
            loads[setting], count = flow.runtime.cache.count.loads, flow.runtime.cache.count
            assert (count.on_host > 0) == (setting != "never")
            assert count.on_host <= count.misses and ("the host computed" in str(flow.report())) == (setting != "never")
    assert loads[how] < loads["never"]


def test_a_budget_on_a_device_that_is_just_large_enough(sim, olmoe):
    "What the model holds itself does not count as taken by others: the same budget, a smaller one, and back."
    path, ref, ids = olmoe
    with offloaded(path, "50%") as flow:
        nominal = flow.plan.nominal
    sim.configure(capacity=nominal + (1 << 20))
    with offloaded(path, f"{nominal}B") as flow:
        for budget in (f"{nominal}B", "25%", f"{nominal}B"):
            flow.set_budget(budget)
        assert flow.plan.nominal == nominal and same(decode(flow.model, ids.to("sim"), 4), decode(ref, ids, 4))
