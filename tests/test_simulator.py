"A replay is the run: the same experts, bytes and waves as the runtime, and nearly its stall."

import json
import time

import bench_simulator as bench
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertflow.config import ConfigError
from expertflow.evictor import POLICIES
from expertflow.flow import find_checkpoint
from expertflow.foresight import Degraded
from expertflow.recorder import record
from expertflow.simulator import Bus, Compute, Copy, Foreseen, Link, Scored, find_link, hottest, simulate, sweep
from expertflow.trace import load_trace
from expertflow.yardsticks import from_pairs

RNG = np.random.default_rng


@pytest.fixture(scope="module")
def tiny():
    return find_checkpoint("tiny-moe")


def both(path, budget, recall=None, passes=((24, 12), (9, 6)), **settings):
    "Counts of the runtime and of the replay; `passes`: prompt and new tokens of each generation."
    seen = None
    if recall is not None:
        with bench.load(path, budget, **settings) as flow:
            first = bench.Watched(flow)
            for n in passes:
                bench.generate(flow, *n)
            seen = [(layer, sorted(e)) for layer, e in first.pairs()]
    with bench.load(path, budget, **settings) as flow:
        n, watched = list(flow.runtime.cache.num_experts), bench.Watched(flow)
        flow.runtime.prefetcher = seen and Degraded(seen, n, recall)
        for p in passes:
            bench.generate(flow, *p)
        flow.runtime.reap(wait=True)
        r = simulate(watched.steps(), **bench.like(flow, prefetcher=seen and Degraded(seen, n, recall)))
        return bench.counts_of(flow), bench.counts_in(r), r


AGREE = [(budget, p) for budget in ("100%", "25%") for p in ("lru", "priority_based")] + [("60%", p) for p in POLICIES]


@pytest.mark.parametrize(("budget", "policy"), AGREE)
def test_hits_misses_and_bytes_are_those_of_the_runtime(tiny, budget, policy):
    real, replayed, r = both(tiny, budget, eviction_policy=policy)
    assert real == replayed and r.hits + r.misses > 500


OTHERS = [{"eviction_threshold": 0.8}, {"eviction_threshold": 0.5, "warmup_steps": 0}, {"preload": False}]


@pytest.mark.parametrize("settings", OTHERS)
def test_also_with_a_threshold_and_from_an_empty_cache(tiny, settings):
    real, replayed, _ = both(tiny, "40%", **settings)
    assert real == replayed


def test_a_recording_replayed_is_the_run(tiny, tmp_path):
    "From the model through a trace on disk; the prompt in blocks, and two texts in a batch."
    with bench.load(tiny, "40%", token_block_size=8, batch=2) as flow:
        with record(flow, tmp_path / "t"), torch.no_grad():
            bench.generate(flow, 24, 12)
            ids = flow.tokenizer(bench.TEXT, return_tensors="pt").input_ids[:, :18].view(2, 9)
            flow.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=6, max_new_tokens=6)
        r = simulate(load_trace(tmp_path / "t"), **bench.like(flow))
        assert bench.counts_of(flow) == bench.counts_in(r) and r.passes > 20


def test_also_of_a_prompt_that_needs_more_experts_than_there_are_slots(tiny):
    "In waves; with a slow link they arrive one by one, here as there."
    real, replayed, r = both(tiny, "0.001%", passes=((12, 2),), paced_link="5MB/s")
    assert real == replayed and r.slots < 8


def test_also_with_a_prefetcher(tiny):
    "What arrives in time depends on the clock, and with it what is taken back."
    real, replayed, r = both(tiny, "50%", recall=1.0)
    assert real["hits"] + real["misses"] == replayed["hits"] + replayed["misses"]
    assert replayed["in_time"] + replayed["late"] > 0 and abs(real["misses"] - replayed["misses"]) <= 0.1 * (r.hits + r.misses)


@pytest.mark.slow
def test_the_stall_is_nearly_that_of_the_runtime(tiny):
    "On a link so slow that a busy machine's delays, milliseconds for each load, are a small part. The figure: bench_simulator."
    torch.set_num_threads(1)
    row = bench.row(tiny, "50%", "lru", 1_000_000, 0.0, None, 8, 6)
    assert not row["differ"]
    assert 0.75 < row["stall_simulated_s"] / row["stall_measured_s"] < 1.1, row


# the clock

def test_a_demand_load_waits_for_one_piece_at_most():
    link = Link("slow", 1000.0, latency=0.5, chunk=100)
    bus, guess, need = Bus(link), Copy(1000, False), Copy(300, True)
    bus.put(guess, 0.0)
    bus.until(1.0)  # two pieces have begun: 0.6 s each
    bus.put(need, 1.0)
    bus.until(100.0)
    assert need.end == pytest.approx(1.2 + 0.5 + 0.3) and guess.end == pytest.approx(need.end + 8 * 0.6)
    assert bus.busy == pytest.approx(0.8 + 10 * 0.6)


def test_what_waits_and_becomes_urgent_goes_whole():
    bus = Bus(Link("slow", 1000.0, latency=0.5, chunk=100))
    jobs = [Copy(500, False) for _ in range(2)]
    for j in jobs:
        bus.put(j, 0.0)
    bus.until(0.1)
    jobs[1].urgent = True
    bus.until(100.0)
    assert jobs[1].end == pytest.approx(0.6 + 1.0) and jobs[0].end == pytest.approx(1.6 + 4 * 0.6)


def test_time_by_hand():
    "Two layers; the second one's expert is named while the first one computes."
    steps = from_pairs([(0, [0]), (1, [0]), (0, [1]), (1, [1])], [2, 2])
    link, compute = Link("1 kB/s", 1000.0, chunk=10**6), Compute([1.0, 2.0], expert=0.25, rest=0.125)
    r = simulate(steps, 4, link=link, compute=compute, expert_bytes=1000)
    assert (r.stall, r.compute) == (4.0, 2 * 3.0 + 4 * 0.25 + 2 * 0.125) and r.seconds == r.stall + r.compute
    ahead = simulate(steps, 4, link=link, compute=compute, expert_bytes=1000, prefetcher=lambda layer, e: [(1, e)] * (layer == 0))
    # asked for while layer 0 waits 1 s for its own: then 0.25 + 2 s remain for 1 s of loading
    assert (ahead.in_time, ahead.late, ahead.misses, ahead.stall) == (2, 0, 2, 2.0)
    assert r.overlap_bound == 1.0 + 1.0 + max(2.25, 1) + max(1.375, 1) + max(2.25, 1) + 0.375
    assert ahead.overlap_bound == r.overlap_bound <= ahead.seconds


def test_late_is_told_from_in_time():
    steps = from_pairs([(0, [0]), (1, [0])], [2, 2])
    r = simulate(steps, 4, link=Link("1 kB/s", 1000.0), compute=Compute([0.0, 0.5]), expert_bytes=1000,
                 prefetcher=lambda layer, e: [(1, [0, 1])])  # fmt: skip
    assert (r.late, r.in_time, r.misses, r.prefetched) == (1, 0, 1, 2)
    assert r.stall == pytest.approx(1.0 + 0.5) and (r.bytes_loaded, r.bytes_useful) == (3000, 2000)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 12))
def test_bytes_and_time_add_up(seed, per_layer, slots):
    rng = RNG(seed)
    L, E = 3, 6
    pairs = [(i % L, rng.permutation(E)[: rng.integers(1, 5)].tolist()) for i in range(60)]
    nbytes, steps = [1000, 2000, 500], from_pairs(pairs, [E] * L)

    def guess(layer, experts):
        return [(int(rng.integers(L)), rng.permutation(E)[:2].tolist()) for _ in range(int(rng.integers(3)))]

    r = simulate(steps, max(slots, L), "lru", link=Link("x", 1e6, 1e-4, 300), compute=Compute(1e-3, expert=1e-4),
                 expert_bytes=nbytes, prefetcher=guess, per_layer=per_layer)  # fmt: skip
    assert r.hits + r.misses == len(steps.experts) and r.loads == r.misses + r.prefetched - r.cancelled
    assert r.seconds == pytest.approx(r.compute + r.stall) and r.compute == pytest.approx(60e-3 + 1e-4 * len(steps.experts))
    assert 0 <= r.bytes_useful <= r.bytes_loaded
    needed = np.array(nbytes)[steps.layer] * r.brought
    assert r.bytes_useful == needed.sum() and (r.resident <= E).all()
    assert r.seconds >= r.byte_bound


def test_a_layer_step_costs_a_few_calls_of_numpy():
    "A million in a minute are 60 us each; machines differ, so the measure is the sorting of as many numbers as there are slots."
    rng = RNG(0)
    ids = rng.zipf(1.3, (4300, 24, 16)) % 32
    pairs = [(layer, list(dict.fromkeys(row))[:4]) for token in ids.tolist() for layer, row in enumerate(token)]
    steps = from_pairs(pairs, [32] * 24)
    start = time.process_time()
    r = simulate(steps, 192, "lru", judge=False)
    spent = time.process_time() - start
    assert len(steps) > 100_000 and r.misses > 0
    scores, start = np.random.default_rng(0).random(192), time.process_time()
    for _ in range(20_000): np.argsort(scores, kind="stable")
    unit = (time.process_time() - start) / 20_000
    assert spent / len(steps) < 45 * unit, f"{spent / len(steps) * 1e6:.0f} us for a layer-step, {unit * 1e6:.1f} us to sort"


def test_what_cannot_be_is_refused():
    steps = from_pairs([(0, [0]), (1, [0])], [2, 2])
    for bad in ({"slots": 0}, {"slots": 1, "per_layer": True}, {"expert_bytes": [1, 2, 3]}, {"link": "pcie9"}, {"link": "0GB"},
                {"policy": "belady"}, {"compute": Compute([1.0])}):  # fmt: skip
        with pytest.raises(ConfigError):
            simulate(steps, **({"slots": 2} | bad))
    assert find_link("12GB/s").bytes_per_second == 12e9 and find_link("pcie4x16").bytes_per_second > 2e10


def test_preloading_what_is_hot():
    rng = RNG(0)
    steps = from_pairs([(i % 2, (rng.zipf(1.5, 2) % 8).tolist()[:1]) for i in range(400)], [8, 8])
    cold = simulate(steps, 6, "lru")
    warm = simulate(steps, 6, "lru", preloaded=hottest(steps), expert_bytes=10)
    assert warm.misses <= cold.misses and warm.bytes_preloaded == 60 and warm.yardsticks.least <= cold.yardsticks.least


# predictors, and many runs

def some_steps(n=240):
    rng = RNG(3)
    return from_pairs([(i % 3, rng.permutation(8)[:2].tolist()) for i in range(n)], [8] * 3)


def test_foresight_names_what_comes_as_often_as_it_is_told():
    steps = some_steps(3000)
    every = list(steps)
    for recall in (0.0, 0.6, 1.0):
        eyes, right = Foreseen(steps, 2, recall), 0
        for i, (layer, experts) in enumerate(every[:-2]):
            named = eyes(layer, experts)
            assert [at for at, _ in named] == [every[i + 1][0], every[i + 2][0]] and all(len(set(e)) == 2 for _, e in named)
            right += len(set(named[0][1]) & set(every[i + 1][1]))
        assert right / (2 * len(every[:-2])) == pytest.approx(recall, abs=0.03)


def test_a_perfect_prefetcher_on_a_quick_link_leaves_misses_of_the_first_layer_only():
    steps = some_steps()
    r = simulate(steps, 12, "lru", link=Link("x", 1e12), compute=Compute(1e-3), prefetcher=Foreseen(steps), expert_bytes=1000)
    assert r.misses == 2 and r.late == 0 and r.wasted == 0


def test_scores_name_the_likeliest_of_the_next_layer():
    need = np.zeros((2, 3, 8))
    need[0, 1, [5, 2]] = 0.9, 0.5
    need[1, 2, 7] = 1.0
    eyes = Scored(need, 2)
    assert [eyes(layer, []) for layer in (0, 1, 2, 0, 1)] == [[(1, [5, 2])], [(2, [0, 1])], [], [(1, [0, 1])], [(2, [7, 0])]]


def test_a_sweep_in_processes_gives_what_one_after_the_other_gives():
    "A prefetcher with a memory begins anew in each run."
    steps = some_steps()
    grid = {"slots": [6, 0.5], "policy": ["lru", "priority_based"]}
    alone = [r.as_dict() for r in sweep(steps, grid, prefetcher=Foreseen(steps, 1, 0.5))]
    assert [(r["slots"], r["policy"]) for r in alone] == [(6, "lru"), (6, "priority_based"), (12, "lru"), (12, "priority_based")]
    assert alone == [r.as_dict() for r in sweep(steps, grid, processes=2, prefetcher=Foreseen(steps, 1, 0.5))]
    assert alone[1] == simulate(steps, 6, "priority_based", prefetcher=Foreseen(steps, 1, 0.5)).as_dict()


def test_results_can_be_read_and_written():
    r = simulate(some_steps(), 0.25, link="instant")
    assert "MIN" in str(r) and "simulated" in str(r)
    back = json.loads(json.dumps(r.as_dict(), allow_nan=False))
    assert back["simulated"] and back["tokens_per_second"] is None and back["yardsticks"]["least"] <= back["loads"]
