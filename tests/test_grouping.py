"Grouping: against all groupings of small cases, on random data, and in time."
import itertools
import time

import numpy as np
import pytest

from expertflow.config import ConfigError
from expertflow.grouping import _climb, _filled, expected, group, in_order

def best_of_all(routes, size):
    "The optimum of two groups of `size`, all of them tried."
    n = len(routes)
    assert n == 2 * size
    return min(expected(routes, [[0, *c], [i for i in range(n) if i and i not in c]]).sum()
               for c in itertools.combinations(range(1, n), size - 1))  # fmt: skip


def draws(rng, n, layers=6, experts=16):
    "Routes of several kinds: noise, two clear tastes, sets, nothing at all, everything."
    yield rng.random((n, layers, experts))
    taste = rng.random((2, layers, experts)) ** 4
    yield np.clip(taste[rng.integers(0, 2, n)] * rng.uniform(0.7, 1.3, (n, layers, experts)), 0, 1)
    yield rng.random((n, layers, experts)) < 0.2
    yield np.zeros((n, layers, experts))
    yield np.ones((n, layers, experts), bool)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("size", [2, 3, 5])
def test_near_the_optimum_of_small_cases(seed, size):
    "Within 5 % (it is at the optimum in most)."
    for routes in draws(np.random.default_rng(seed), 2 * size):
        assert expected(routes, group(routes, size)).sum() <= 1.05 * best_of_all(routes, size) + 1e-6


@pytest.mark.parametrize("seed", range(12))
def test_never_worse_than_arrival_and_whole(seed):
    rng = np.random.default_rng(seed)
    n, size = int(rng.integers(1, 50)), int(rng.integers(1, 20))
    for routes in draws(rng, n):
        groups = group(routes, size)
        assert sorted(itertools.chain(*groups)) == list(range(n)) and all(0 < len(g) <= size and g == sorted(g) for g in groups)
        assert len(groups) <= -(-n // size) and [g[0] for g in groups] == sorted(g[0] for g in groups)
        assert expected(routes, groups).sum() <= expected(routes, in_order(n, size)).sum() + 1e-9
        assert group(routes, size) == groups, "the same again"


def test_finds_what_is_there():
    "Four kinds of sequences that share nothing, shuffled: each group is of one kind."
    kinds = np.random.default_rng(3).permutation(np.repeat(np.arange(4), 8))
    routes = np.zeros((32, 4, 32))
    for i, k in enumerate(kinds):
        routes[i, :, 8 * k : 8 * k + 8] = 0.4
    assert all(len({kinds[i] for i in g}) == 1 for g in group(routes, 8))


def test_swaps_stop_at_a_local_optimum():
    "No single swap of two members is left that would help."
    routes = np.random.default_rng(0).random((12, 3, 8)) ** 3
    u = (1 - routes).reshape(12, -1).astype(np.float32).clip(1e-6)
    of = _climb(u, np.arange(12) // 4)
    cost = lambda of: expected(routes, [np.flatnonzero(of == g).tolist() for g in range(3)]).sum()
    for i, j in itertools.combinations(range(12), 2):
        swapped = of.copy()
        swapped[[i, j]] = of[[j, i]]
        assert cost(swapped) > cost(of) - 2e-3
    assert sorted(_filled(u, 4).tolist()) == sorted([0, 1, 2] * 4)


def test_uneven_groups_may_be_better():
    "Five of a kind and one of another, groups of at most five: five and one, not three and three."
    routes = np.zeros((6, 1, 10))
    routes[:, 0, :5] = 1
    routes[2] = 0
    routes[2, 0, 5:] = 1
    assert group(routes, 5) == [[0, 1, 3, 4, 5], [2]]


def test_planned_in_ten_milliseconds():
    "32 sequences, 24 layers of 32 experts; the quickest of several, since other programs only make it slower."
    rng = np.random.default_rng(0)
    routes = np.clip(rng.dirichlet(np.full(32, 0.3), (32, 24)) * 4, 0, 1)
    took = []
    for _ in range(20):
        start = time.perf_counter()
        group(routes, 16)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.010, f"{min(took) * 1e3:.1f} ms"


BAD = [(np.zeros((0, 2, 4)), "shape"), (np.zeros((4, 8)), "shape"), (np.full((4, 2, 4), np.nan), "0 to 1"),
       (np.full((4, 2, 4), 1.5), "0 to 1"), (np.full((4, 2, 4), -0.1), "0 to 1")]  # fmt: skip


@pytest.mark.parametrize("bad, what", BAD)
def test_refuses_what_are_no_probabilities(bad, what):
    with pytest.raises(ConfigError, match=what):
        group(bad, 2)
