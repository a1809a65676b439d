"The expert cache under long random schedules: invariants after every operation, loads that fail, waves, fixed orders."

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertflow.cache import (
    ABSENT,
    ExpertCache,
    Load,
    admit,
    balance,
    check,
    done,
    end,
    failed,
    loaded,
    noted,
    reserve,
    resize,
    steal,
)
from expertflow.evictor import POLICIES, make_evictor

schedule = st.fixed_dictionaries({
    "seed": st.integers(0, 2**32 - 1), "layers": st.integers(1, 4), "experts": st.integers(2, 12), "slots": st.integers(2, 30),
    "threshold": st.sampled_from([0.5, 0.9, 1.0]), "warmup": st.integers(0, 10), "policy": st.sampled_from(POLICIES),
})


def make(c):
    ev = make_evictor(c["policy"], [[64] * c["experts"]] * c["layers"])
    return ExpertCache([c["experts"]] * c["layers"], c["slots"], ev, c["threshold"], c["warmup"])


@given(schedule)
@settings(max_examples=150, deadline=None)
def test_any_order(c):
    "Hits first, then waves: each missing expert is loaded once, and no pinned expert ever moves."
    rng, cache = np.random.default_rng(c["seed"]), make(c)
    for _ in range(25):
        layer = int(rng.integers(c["layers"]))
        need = rng.choice(c["experts"], rng.integers(1, c["experts"] + 1), replace=False).tolist()
        step = cache.begin(layer, need)
        todo, reads, seen = list(step.hits), [], []
        while todo or step.misses:
            for x in admit(cache, step):
                check(cache)
                if rng.random() < 0.1:  # this read fails; somebody asks again
                    failed(cache, x)
                    step.pinned.discard(x.expert)
                    step.misses.append(x.expert)
                else:
                    loaded(cache, x)
                    reads.append(x.expert)
                    todo.append(x.expert)
            check(cache)
            for e in step.pinned:
                assert cache.slot_of[layer][e] != ABSENT and cache.pins[cache.slot_of[layer][e]] == 1
            if todo:
                e = todo.pop(int(rng.integers(len(todo))))
                seen.append(e)
                done(cache, step, e)
        end(cache, step)
        check(cache)
        assert sorted(seen) == sorted(need) and len(reads) == len(set(reads)) == step.n_missed
        assert not cache.pins.any() and not cache.loading.any()


@given(schedule)
@settings(max_examples=150, deadline=None)
def test_fixed_order(c):
    "Ascending order, whatever is resident: it always ends, and every expert is read at most once per step."
    rng, cache = np.random.default_rng(c["seed"]), make(c)
    for _ in range(25):
        layer = int(rng.integers(c["layers"]))
        need = sorted(rng.choice(c["experts"], rng.integers(1, c["experts"] + 1), replace=False).tolist())
        step, reads = cache.begin(layer, need), []
        for e in need:
            while e not in step.pinned:
                loads = admit(cache, step)
                for x in loads:
                    loaded(cache, x)
                    reads.append(x.expert)
                if not loads:
                    steal(cache, step, e)
                check(cache)
            done(cache, step, e)
        end(cache, step)
        check(cache)
        assert len(reads) == len(set(reads))


def test_step_is_atomic():
    "An expert that the running step needs is never evicted for another one of the same step."
    cache = ExpertCache([6], 4, make_evictor("lru", [[1] * 6]))
    for need in ([0, 1, 2, 3], [0, 1, 2, 4]):
        s = cache.begin(0, need)
        for x in admit(cache, s):
            loaded(cache, x)
        end(cache, s)
    assert cache.slot_of[0][3] == ABSENT and all(cache.slot_of[0][e] != ABSENT for e in (0, 1, 2, 4))
    assert cache.count.evictions == 1 and cache.count.hits == 3 and cache.count.misses == 5


def run(cache, needs):
    for layer, need in needs:
        s = cache.begin(layer, need)
        for x in admit(cache, s):
            loaded(cache, x)
        end(cache, s)


def test_threshold_starts_eviction_and_warmup_delays_it():
    def fresh(warmup):
        return ExpertCache([20], 10, make_evictor("lru", [[1] * 20]), threshold=0.8, warmup_steps=warmup)

    now, later = fresh(0), fresh(3)
    for c in (now, later):
        run(c, [(0, range(0, 5)), (0, range(5, 10))])
    assert len(now.free) == 2 and now.count.evictions == 2  # down to 8 of 10
    assert len(later.free) == 0 and later.count.evictions == 0  # still warming up
    run(later, [(0, [0]), (0, [1])])
    assert len(later.free) == 2


def test_everything_fits_nothing_is_evicted():
    cache = ExpertCache([4, 4], 8, make_evictor("priority_based", [[1] * 4] * 2), threshold=0.5)
    run(cache, [(layer, range(4)) for layer in (0, 1)] * 5)
    assert cache.count.evictions == 0 and cache.count.misses == 8


def test_failed_load_leaves_nothing_behind():
    cache = ExpertCache([4], 2, make_evictor("lru", [[1] * 4]))
    s = cache.begin(0, [0, 1])
    a, b = admit(cache, s)
    loaded(cache, a)
    failed(cache, b)
    s.pinned.discard(1)
    end(cache, s)
    check(cache)
    assert cache.slot_of[0] == [a.slot, ABSENT, ABSENT, ABSENT] and cache.free == [b.slot]


def test_too_few_slots_for_a_fixed_order_says_so():
    cache = ExpertCache([4], 1, make_evictor("lru", [[1] * 4]))
    s = cache.begin(0, [0, 1])
    (x,) = admit(cache, s)
    assert isinstance(x, Load) and x.expert == 0
    with pytest.raises(RuntimeError, match="1 slots are too few"):
        steal(cache, s, keep=1)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_needs_no_expert(policy):
    "longcat_flash has experts that do nothing; a token may pick only those."
    cache = make({"policy": policy, "experts": 4, "layers": 2, "slots": 3, "threshold": 0.9, "warmup": 0})
    step = cache.begin(0, [])
    assert admit(cache, step) == [] and end(cache, step) == [] and not step.pinned
    check(cache)


def test_guesses_that_make_no_sense():
    "Experts that do not exist are not loaded, and what was expected in vain does not stay protected."
    cache = ExpertCache([4, 4], 3, make_evictor("lru", [[1] * 4] * 2))
    assert [x.expert for x in reserve(cache, 1, [-1, 99, 2, 2])] == [2]
    check(cache)
    full = ExpertCache([4, 4], 2, make_evictor("lru", [[1] * 4] * 2))
    run(full, [(0, [0, 1])])
    assert reserve(full, 0, range(4)) == [] and full.expected[:4].all()
    run(full, [(0, [0])])
    assert not full.expected.any()


def test_prefetches_settle_wherever_they_are_used():
    cache = ExpertCache([2], 2, make_evictor("lru", [[1] * 2]))
    for x in reserve(cache, 0, [0, 1]):
        loaded(cache, x)
    assert cache.hit_all(0, [0]) == [cache.slot_of[0][0]] and cache.count.in_time == 1
    noted(cache, 0, [1])
    assert cache.count.in_time == 2 and not cache.fresh.any()


@given(schedule, st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_resize_keeps_the_tables_straight(c, n):
    rng, cache = np.random.default_rng(c["seed"]), make(c)
    for _ in range(10):
        for x in reserve(cache, int(rng.integers(c["layers"])), rng.permutation(c["experts"]).tolist(), int(rng.integers(4))):
            loaded(cache, x)
        resize(cache, max(1, int(rng.integers(n + 1))))
        check(cache)


@given(schedule)
@settings(max_examples=150, deadline=None)
def test_every_prefetch_is_accounted_for(c):
    "They arrive, fail, are called off, thrown out, stolen from, needed early or late, and at last all are gone."
    rng, cache = np.random.default_rng(c["seed"]), make(c)
    off = 0

    def load_of(slot):
        return Load(*divmod(int(cache.owner[slot]), cache.E), int(slot))

    def straight():
        check(cache)
        assert balance(cache) == 0 and cache.count.cancelled == off, cache.count
        assert not cache.fresh[cache.owner == ABSENT].any()

    for _ in range(40):
        reserve(cache, int(rng.integers(c["layers"])), rng.permutation(c["experts"])[:4].tolist(), int(rng.integers(4)))
        straight()
        for slot in np.flatnonzero(cache.loading):
            p = rng.random()
            if p < 0.4:
                loaded(cache, load_of(slot))
            elif p < 0.5:
                failed(cache, load_of(slot))
            elif p < 0.6:
                cache.call_off(slot)
                failed(cache, load_of(slot))
                off += 1
            straight()
        layer = int(rng.integers(c["layers"]))
        need = sorted(rng.choice(c["experts"], rng.integers(1, c["experts"] + 1), replace=False).tolist())
        step = cache.begin(layer, need)
        assert step.late == {e for e in step.hits if cache.loading[cache.slot_of[layer][e]]}
        for e in need:
            while e not in step.pinned:
                if not admit(cache, step):
                    late = [e for e in step.pinned if cache.loading[cache.slot_of[layer][e]]]
                    for x in late:
                        loaded(cache, Load(layer, x, cache.slot_of[layer][x]))
                    if not late and not step.pinned:
                        break  # prefetches on their way hold every slot
                    if not late:
                        steal(cache, step, e)
                straight()
            if e in step.pinned:
                loaded(cache, Load(layer, e, cache.slot_of[layer][e]))
                done(cache, step, e)
        end(cache, step)
        straight()
        for slot in np.flatnonzero(cache.loading):
            loaded(cache, load_of(slot))
        if rng.random() < 0.3:
            there = [e for e, s in enumerate(cache.slot_of[layer]) if s != ABSENT]
            noted(cache, layer, there[: rng.integers(len(there) + 1)])
        if rng.random() < 0.2:
            resize(cache, int(rng.integers(2, 31)))
        straight()
    for slot in np.flatnonzero(cache.owner != ABSENT):
        failed(cache, load_of(slot))
    n = cache.count
    assert n.prefetched == n.in_time + n.late + n.wasted + n.cancelled
