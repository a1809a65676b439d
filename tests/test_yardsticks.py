"Bounds are bounds: MIN against exhaustive search, and every policy against MIN."

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertflow.config import ConfigError
from expertflow.evictor import POLICIES
from expertflow.simulator import simulate
from expertflow.trace import import_trace
from expertflow.yardsticks import from_pairs, layer_steps, min_loads, overlap_bound, yardsticks

DEEP = settings(max_examples=150, deadline=None)


@st.composite
def loads(draw, layers=3, experts=4, longest=10, widest=3):
    "Layer-steps of a few layers in turn, each with a set of experts."
    L, E = draw(st.integers(1, layers)), draw(st.integers(1, experts))
    some = st.lists(st.integers(0, E - 1), min_size=1, max_size=min(E, widest), unique=True)
    return from_pairs([(i % L, e) for i, e in enumerate(draw(st.lists(some, min_size=1, max_size=longest)))], [E] * L)


def exhaustive(steps, n_slots, forced, resident):
    "Fewest loads over everything that could be kept, step by step."
    best, E = {frozenset(resident): 0}, max(steps.num_experts)
    for layer, experts in steps:
        need, new = {layer * E + e for e in experts}, {}
        for have, cost in best.items():
            now, pool = cost + len(need - have), have | need
            for n in range(min(n_slots, len(pool)) + 1):
                for keep in map(frozenset, itertools.combinations(sorted(pool), n)):
                    if not forced or len(keep - need) <= max(0, n_slots - len(need)):
                        new[keep] = min(now, new.get(keep, now))
        best = new
    return min(best.values())


@DEEP
@given(loads(layers=2), st.integers(1, 5), st.booleans(), st.sets(st.integers(0, 7), max_size=3))
def test_min_is_what_exhaustive_search_finds(steps, n_slots, forced, resident):
    there = [i for i in resident if i < len(steps.num_experts) * max(steps.num_experts)][:n_slots]
    assert min_loads(steps, n_slots, forced=forced, resident=there).sum() == exhaustive(steps, n_slots, forced, there)


@DEEP
@given(loads(layers=2, longest=8), st.integers(1, 3))
def test_the_best_start_is_the_best_of_all(steps, n_slots):
    ids = range(len(steps.num_experts) * max(steps.num_experts))
    starts = itertools.combinations(ids, min(n_slots, len(ids)))
    assert min_loads(steps, n_slots, resident=None).sum() == min(min_loads(steps, n_slots, resident=x).sum() for x in starts)


@DEEP
@given(loads(longest=40), st.integers(1, 8), st.booleans())
def test_more_sight_is_never_worse_than_none_and_never_better_than_all(steps, n_slots, forced):
    least = min_loads(steps, n_slots, forced=forced).sum()
    seen = [min_loads(steps, n_slots, w, forced=forced).sum() for w in (0, 1, 3, 100)]
    assert min(seen) >= least and seen[-1] == least


@settings(max_examples=400, deadline=None)
@given(loads(longest=60, widest=4), st.sampled_from(POLICIES), st.integers(1, 10), st.randoms(), st.booleans())
def test_no_policy_beats_min(steps, policy, n_slots, rng, per_layer):
    "Whatever is prefetched, and whatever was there at the start."
    L, E = len(steps.num_experts), max(steps.num_experts)
    start = [(rng.randrange(L), rng.randrange(E)) for _ in range(rng.choice([0, 0, 6]))]

    def wild(layer, experts):
        return [(rng.randrange(L), rng.sample(range(E), rng.randint(0, E))) for _ in range(2)]

    guess = rng.choice([None, wild])
    n = n_slots + L if per_layer else n_slots
    more = {"expert_bytes": 1000, "link": "1GB", "prefetcher": guess, "preloaded": dict.fromkeys(start), "per_layer": per_layer}
    r = simulate(steps, n, policy, **more, threshold=rng.choice([1.0, 0.7]), warmup_steps=0)
    y = r.yardsticks
    assert r.loads >= y.least and r.brought.sum() >= y.least
    assert r.hits + r.misses == y.needed == len(steps.experts)
    fits = n_slots >= np.diff(steps.ends).max()
    if guess is None:
        assert r.loads == r.misses
        assert not fits or per_layer or r.misses >= y.forced
    assert r.seconds >= r.byte_bound - 1e-12


@DEEP
@given(loads(longest=60))
def test_lru_is_the_oracle_that_sees_nothing(steps):
    "One expert a step, so that no two were used last at the same time."
    single = from_pairs([(layer, e[:1]) for layer, e in steps], steps.num_experts)
    for n_slots in (1, 2, 4):
        r = simulate(single, n_slots, "lru", judge=False)
        assert r.misses == min_loads(single, n_slots, window=0).sum() == min_loads(single, n_slots, window=0, forced=True).sum()


def test_slots_of_its_own_for_each_layer():
    rng = np.random.default_rng(0)
    steps = from_pairs([(i % 3, rng.choice(6, 2, replace=False).tolist()) for i in range(300)], [6, 6, 6])
    each = [min_loads(steps.of_layer(i), n).sum() for i, n in enumerate((2, 3, 4))]
    got = min_loads(steps, (2, 3, 4))
    assert [got[steps.layer == i].sum() for i in range(3)] == each
    assert min_loads(steps, 9).sum() <= got.sum()
    there = [0, 7, 14]
    assert min_loads(steps, (2, 3, 4), resident=there).sum() >= got.sum() - 3
    assert yardsticks(steps, (2, 3, 4), there).least == min_loads(steps, (2, 3, 4), resident=there).sum()


def test_layer_steps_of_a_trace(tmp_path):
    "Two prompts' tokens in one pass need the union; a token that is decoded keeps its router's order."
    np.savez(tmp_path / "t.npz", experts=np.array([[[3, 1], [0, 2]], [[1, 0], [2, 3]], [[2, 0], [1, 0]]], np.uint8))
    trace = import_trace(tmp_path / "t.npz")
    assert list(layer_steps(trace)) == [(0, [3, 1]), (1, [0, 2]), (0, [1, 0]), (1, [2, 3]), (0, [2, 0]), (1, [1, 0])]
    trace.step[:] = [0, 0, 1]
    steps = layer_steps(trace)
    assert list(steps)[:2] == [(0, [0, 1, 3]), (1, [0, 2, 3])] and steps.tokens.tolist() == [2, 1]
    assert steps.turn.tolist() == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match="without tokens"):
        layer_steps(trace[:0])


def test_overlap_is_worth_a_factor_of_two_at_most():
    rng = np.random.default_rng(1)
    compute, transfer = rng.random(100), rng.random(100)
    compute[0] = 0
    bound = overlap_bound(compute, transfer)
    assert max(compute.sum(), transfer.sum()) <= bound <= compute.sum() + transfer.sum() <= 2 * bound
