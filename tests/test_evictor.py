"Eviction policies and the forecast: against slow references, on hostile input, and on recorded routing."
import itertools
from collections import OrderedDict, deque

import numpy as np
import pytest
from bench_policies import Played, replay, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from expertflow import config, evictor
from expertflow.cache import ExpertCache, admit, check, end, loaded, resize
from expertflow.config import ConfigError
from expertflow.evictor import (
    ARC,
    LRU,
    POLICIES,
    S3FIFO,
    ForecastDriven,
    Frequency,
    Guarded,
    LeastStale,
    RouterScore,
    make_evictor,
)
from expertflow.forecast import LearnedForecast, PredictedForecast, discounted
from expertflow.simulator import simulate
from expertflow.trace import import_trace
from expertflow.yardsticks import from_pairs

TRACE = "data/routing/gpt-oss-20b/gpt_oss_20b_decode.npz"


def routing(rng, T=200, L=4, E=16, K=2, drift=50):      # [T, L, K]
    "Skewed, and every `drift` tokens otherwise."
    out = np.empty((T, L, K), np.int64)
    for t in range(T):
        if t % drift == 0: p = [rng.permutation(1 / np.arange(1, E + 1)) for _ in range(L)]
        for layer in range(L): out[t, layer] = rng.choice(E, K, replace=False, p=p[layer] / p[layer].sum())
    return out


def steps_of(x, E): return from_pairs([(layer, e) for row in x for layer, e in enumerate(row)], [E] * x.shape[1])


def run_one(ev, requests, slots):      # one expert at a time -> loads, who went
    cache, gone = ExpertCache([ev_size(ev)], slots, ev), []
    for e in requests:
        s = cache.begin(0, [e])
        for x in admit(cache, s):
            loaded(cache, x)
            gone.append(x.evicted)
        end(cache, s)
    check(cache)
    return cache.count.loads, [g for g in gone if g >= 0]


def ev_size(ev): return len(ev.queue) if hasattr(ev, "queue") else len(ev.last)


def test_the_names_agree():
    assert config.POLICIES == evictor.POLICIES
    with pytest.raises(ConfigError, match="forecast"): make_evictor("lfuu", [[1]])


# any policy

@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_scores_what_it_is_asked(policy):
    "Finite, one score for each candidate, and no change of opinion by being asked."
    rng = np.random.default_rng(1)
    ev = make_evictor(policy, [[3] * 8, [5] * 6])
    cache = ExpertCache([8, 6], 5, ev)
    for t in range(60):
        layer = t % 2
        s = cache.begin(layer, rng.choice(6, 2, replace=False).tolist())
        for x in admit(cache, s): loaded(cache, x)
        end(cache, s)
        ids = cache.owner[cache.owner >= 0]
        a, b = ev.score(cache.count.steps, ids), ev.score(cache.count.steps, ids)
        assert a.shape == ids.shape and np.isfinite(a).all() and (a == b).all()
        check(cache)
    assert ev.score(99, ids[:0]).shape == (0,)


@pytest.mark.parametrize("policy", POLICIES)
def test_more_slots_than_before_and_fewer(policy):
    rng = np.random.default_rng(2)
    ev = make_evictor(policy, [[1] * 8] * 3)
    cache = ExpertCache([8] * 3, 9, ev)
    for t in range(90):
        if t in (30, 60): resize(cache, {30: 4, 60: 16}[t])
        s = cache.begin(t % 3, rng.choice(8, 3, replace=False).tolist())
        for x in admit(cache, s): loaded(cache, x)
        end(cache, s)
        check(cache)
        if hasattr(ev, "moved"):
            inside = ev.queue > 0 if isinstance(ev, S3FIFO) else ev.inside
            assert set(np.flatnonzero(inside)) == set(cache.owner[cache.owner >= 0].tolist())


@pytest.mark.parametrize("policy", ["lfu", "decayed_frequency", "frequency_over_age", "priority_based"])
def test_the_dearer_to_move_stays(policy):
    ev = make_evictor(policy, [[1, 2]])
    for t in range(10): ev.observe(t, np.array([0, 1]))
    assert ev.score(10, np.array([0, 1])).argmin() == 0


def test_forecast_weighs_bytes():
    p = ForecastDriven(np.array([1.0, 2.0]), 1, LearnedForecast([2]))
    for t in range(10): p.observe(t, np.array([0, 1]))
    a, b = p.score(10, np.array([0, 1]))
    assert b == pytest.approx(2 * a)


@pytest.mark.parametrize("policy", POLICIES)
def test_bench_replays_as_the_simulator_does(policy):
    "Up to ties: the cache orders candidates by slot, the bench by number."
    x = routing(np.random.default_rng(3))
    for per_layer, slots in ((False, 20), (True, 5)):
        fast = replay(x, 16, lambda g: make_evictor(policy, [[1] * 16 for _ in g]), slots, per_layer)
        real = simulate(steps_of(x, 16), slots * (4 if per_layer else 1), policy, per_layer=per_layer, link="instant").loads
        assert abs(fast - real) <= 0.02 * real, (per_layer, fast, real)


# S3-FIFO and ARC against the papers' own loops

def s3_fifo(requests, slots, share=0.1):
    "The paper's pseudo-code; ghosts as many as the main queue has places. Who went, in order."
    small, main, ghost, freq, gone = deque(), deque(), deque(), {}, []
    for x in requests:
        if x in small or x in main:
            freq[x] = min(freq[x] + 1, 3)
            continue
        if len(small) + len(main) == slots:
            while True:
                if len(small) > share * slots and small:
                    y = small.popleft()
                    if freq[y] > 1:
                        main.append(y)
                        freq[y] = 0
                        if len(small) > share * slots or main: continue
                    ghost.append(y)
                    while len(ghost) > (1 - share) * slots: ghost.popleft()
                    gone.append(y)
                    break
                if not main: y = small.popleft(); ghost.append(y); gone.append(y); break
                y = main.popleft()
                if freq[y] > 0:
                    freq[y] -= 1
                    main.append(y)
                else:
                    gone.append(y)
                    break
        freq[x] = 0
        if x in ghost:
            ghost.remove(x)
            main.append(x)
        else: small.append(x)
    return gone


def test_s3_fifo_sends_away_whom_the_paper_sends_away():
    "On skewed requests. (A promotion can end the paper's walk in the other queue: few differ.)"
    rng = np.random.default_rng(4)
    requests = rng.choice(60, 3000, p=(w := 1 / np.arange(1, 61)) / w.sum()).tolist()
    _, gone = run_one(S3FIFO(60), requests, 20)
    want = s3_fifo(requests, 20)
    assert abs(len(gone) - len(want)) <= 0.02 * len(want)


def arc(requests, c):
    "Figure 4 of the paper. How many misses."
    t1, t2, b1, b2 = (OrderedDict() for _ in range(4))
    p, misses = 0.0, 0

    def replace(x):
        if t1 and (len(t1) > p or (x in b2 and len(t1) == p)): b1[t1.popitem(last=False)[0]] = 1
        else: b2[t2.popitem(last=False)[0]] = 1

    for x in requests:
        if x in t1 or x in t2:
            t1.pop(x, None)
            t2.pop(x, None)
            t2[x] = 1
            continue
        misses += 1
        if x in b1:
            p = min(p + max(len(b2) / len(b1), 1), c)
            replace(x)
            del b1[x]
            t2[x] = 1
        elif x in b2:
            p = max(p - max(len(b1) / len(b2), 1), 0)
            replace(x)
            del b2[x]
            t2[x] = 1
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.popitem(last=False)
                    replace(x)
                else: t1.popitem(last=False)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c: b2.popitem(last=False)
                replace(x)
            t1[x] = 1
    return misses


@pytest.mark.parametrize("seed", range(4))
def test_arc_misses_as_often_as_the_paper(seed):
    rng = np.random.default_rng(seed)
    skew = rng.choice(60, 2000, p=(w := 1 / np.arange(1, 61)) / w.sum()).tolist()
    requests = list(itertools.chain(skew, range(60), skew[:500], range(60)))       # and two scans
    misses = run_one(ARC(60), requests, 15)[0]
    assert abs(misses - arc(requests, 15)) <= 0.02 * misses


def test_least_stale_by_hand():
    p = LeastStale(6, 3)
    for now, e in enumerate([0, 2, 4, 1, 3]): p.observe(now, np.array([e]))
    assert p.score(5, np.array([0, 2, 1, 3, 4])).argsort().tolist() == [0, 1, 3, 2, 4]


def test_frequencies_fade():
    p = Frequency(np.ones(2), 1, fade=4.0)
    for t in range(20): p.observe(t, np.array([0]))
    for t in range(20, 30): p.observe(t, np.array([1]))
    assert p.score(30, np.arange(2)).argmin() == 0


def test_router_scores_find_the_fifth_place():
    p = RouterScore(np.ones(8), 2)
    for _ in range(20): p.scored(1, np.array([[0.6, 0.3, 0.09, 0.01]] * 3))
    assert p.score(1, np.arange(4, 8)).argsort()[::-1].tolist() == [0, 1, 2, 3]
    assert p.score(1, np.arange(4)).tolist() == [0] * 4


# the forecast

@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 9), st.sampled_from([0.5, 0.8, 0.95]))
def test_moments_are_those_of_the_definition(seed, E, gamma):
    rng = np.random.default_rng(seed)
    f, past = LearnedForecast([E, E], gamma=gamma), []
    for _ in range(30):
        for layer in range(2):
            e = rng.choice(E, rng.integers(1, E + 1), replace=False)
            f.observe(layer, e)
            if layer: past.append((f.summaries.c[1].copy(), e))
    v, R = np.zeros(E), np.zeros_like(f.moments.R[1])
    for c, e in reversed(past):
        R += np.multiply.outer(c, v)
        v *= gamma
        v[e] = 1
    assert np.allclose(f.moments.R[1], R, rtol=1e-3, atol=1e-3)
    assert np.allclose(f.moments.G[1], sum(np.multiply.outer(c, c) for c, _ in past), rtol=1e-3, atol=1e-3)


def test_forgetting_keeps_what_was_learned():
    rng = np.random.default_rng(0)
    f = LearnedForecast([8])
    for _ in range(100): f.observe(0, rng.choice(8, 2, replace=False))
    W, G = f.W.copy(), f.moments.G.copy()
    f.forget()
    assert (f.W == W).all() and (f.moments.G == G).all() and not f.summaries.c[0, :-1].any()
    f.observe(0, np.array([1, 2]))
    assert np.isfinite(f.value).all()


def test_too_many_experts_are_guessed():
    f = LearnedForecast([200])
    assert not f.learn and f.moments.G.size == 0
    for t in range(50): f.observe(0, np.array([3, t]))
    assert f.value[0].argmax() == 3


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.sampled_from([0.5, 0.8, 0.9]))
def test_discounted_is_the_sum(p, gamma):
    at = np.interp(np.arange(400), [0, 2, 5], p)
    alive, want = 1.0, 0.0
    for n, q in enumerate(at):
        want += gamma**n * alive * q
        alive *= 1 - q
    assert discounted(np.array(p), [0, 2, 5], gamma) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("bad", [np.full((5, 2, 3), np.nan), np.full((5, 2, 3), 7.0), np.full((5, 2, 3), -np.inf)])
def test_nonsense_probabilities_are_survived(bad):
    f = PredictedForecast([3, 3])
    f.update(bad)
    f.observe(0, np.array([1]))
    assert np.isfinite(f.value).all() and (f.value >= 0).all() and (f.value <= 1).all()
    with pytest.raises(ConfigError, match="wanted"): f.update(bad[:2])
    with pytest.raises(ConfigError, match="ascending"): PredictedForecast([3], distance=(1, 2, 4))
    with pytest.raises(ConfigError, match="gamma"): LearnedForecast([3], gamma=1.0)


# the guard

class Clairvoyant:
    "Knows the future; with `sign` -1 it keeps exactly who is needed last. Changes its mind every `turn` passes, if there is one."
    gamma = 0.8

    def __init__(self, x, E, sign=1, turn=0):
        T, L, _ = x.shape
        self.t, self.value, self.ahead = [0] * L, np.zeros((L, E), np.float32), np.zeros((T, L, E), np.float32)
        v = np.zeros((L, E))
        for t in range(T - 1, -1, -1):
            flip = sign * (-1 if turn and t // turn % 2 else 1)
            self.ahead[t] = v if flip > 0 else 1 - v
            v *= self.gamma
            for layer in range(L): v[layer, x[t, layer]] = 1

    def observe(self, layer, experts):
        self.value[layer] = self.ahead[self.t[layer], layer]
        self.t[layer] += 1


def guarded(forecast, L, E): return Guarded(LRU(L * E), ForecastDriven(np.ones(L * E), L, forecast), L * E)


@pytest.mark.parametrize("turn", [0, 3, 40, 400])
@pytest.mark.parametrize("slots", [12, 24])
def test_an_adversary_costs_at_most_two_percent(turn, slots):
    "On a long trace; also one that is right for a while, to be trusted again, and wrong then."
    E, L = 16, 4
    x = routing(np.random.default_rng(5), T=4000, L=L, E=E)
    lru = replay(x, E, lambda g: LRU(L * E), slots, False)
    bad = replay(x, E, lambda g: guarded(Clairvoyant(x, E, -1, turn), L, E), slots, False)
    assert bad <= 1.02 * lru, f"{bad / lru - 1:.2%} more"
    if not turn:
        naked = replay(x, E, lambda g: ForecastDriven(np.ones(L * E), L, Clairvoyant(x, E, -1)), slots, False)
        assert naked > 1.2 * lru        # the adversary is one


def test_the_guard_lets_a_good_forecast_through():
    E, L = 16, 4
    x = routing(np.random.default_rng(6), T=1000, L=L, E=E)
    lru = replay(x, E, lambda g: LRU(L * E), 24, False)
    naked = replay(x, E, lambda g: ForecastDriven(np.ones(L * E), L, Clairvoyant(x, E)), 24, False)
    good = replay(x, E, lambda g: guarded(Clairvoyant(x, E), L, E), 24, False)
    assert good <= 1.01 * naked < 0.8 * lru


def test_the_guard_goes_back_to_a_forecast_that_recovers():
    E, L = 16, 4
    x = routing(np.random.default_rng(7), T=3000, L=L, E=E)
    f = Clairvoyant(x, E)
    f.ahead[:300] = 1 - f.ahead[:300]
    g = guarded(f, L, E)
    lru, mixed = replay(x, E, lambda _: LRU(L * E), 24, False), replay(x, E, lambda _: g, 24, False)
    assert g.leader is g.trial and mixed < 0.9 * lru


def test_constant_forecast_does_no_harm(shared):
    x = next(t for t in import_trace(shared / TRACE).sequences() if len(t) > 200).ids[:200].astype(np.int64)
    flat = np.full((*x.shape[:2], 32), 0.5, np.float32)
    lru = replay(x, 32, lambda g: LRU(768), 192, False)
    assert replay(x, 32, lambda g: guarded(Played(flat, list(range(24)), 0.8), 24, 32), 192, False) <= 1.02 * lru + 192


def test_a_learned_forecast_beats_lru_on_recorded_routing(shared):
    "Learned from three sequences, judged on another."
    texts = [t.ids.astype(np.int64) for t in import_trace(shared / TRACE).sequences()]
    f = LearnedForecast([32] * 24)
    for x in texts[5:35:10]: values_of(f, x)
    x = texts[200][:250]
    values = values_of(f, x)
    lru = replay(x, 32, lambda g: LRU(768), 192, False)
    mine = replay(x, 32, lambda g: guarded(Played(values, g, 0.8), 24, 32), 192, False)
    assert mine < 0.9 * lru
