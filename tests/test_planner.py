"A planner may be told anything: it costs little, breaks nothing, and decides alike in the runtime and in the simulator."

import bench_simulator as bench
import numpy as np
import pytest
import torch
from bench_planner import Hostile, Recorded, setting
from test_device import offloaded as on_device
from test_device import prompt
from test_device import resident as on_cpu
from test_exact import generate, same

from expertflow.cache import balance, check
from expertflow.evictor import POLICIES
from expertflow.flow import ExpertFlow, find_checkpoint
from expertflow.foresight import Foresight
from expertflow.planner import Measured, Planned, Planner, carry_out
from expertflow.simulator import Compute, Filling, simulate
from expertflow.taps import find_taps
from expertflow.testing import write_checkpoint
from expertflow.yardsticks import from_pairs

pytest_plugins = ["simdev.plugin"]


def routing(passes, L=12, E=32, K=4, stay=0.7, seed=0):
    "Layer-steps: each layer keeps most of its experts from one pass to the next, and likes some of the others."
    rng = np.random.default_rng(seed)
    liked = [rng.permutation(E)[:14] for _ in range(L)]
    last, pairs = [x[:K].tolist() for x in liked], []
    for _ in range(passes):
        for layer in range(L):
            kept = [e for e in last[layer] if rng.random() < stay]
            pool = [*rng.permutation(liked[layer]).tolist(), *rng.permutation(E).tolist()]
            last[layer] = kept + [e for e in dict.fromkeys(pool) if e not in kept][: K - len(kept)]
            pairs.append((layer, sorted(last[layer])))
    return from_pairs(pairs, [E] * L)


class Known(Recorded):
    "The truth, sure of itself."

    def __init__(self, steps, ahead=3):
        need = np.zeros((len(steps), ahead, max(steps.num_experts)))
        steps = list(steps)
        for i, (layer, _) in enumerate(steps):
            for d, (to, e) in enumerate(steps[i + 1 : i + 1 + ahead]):
                if to > layer:
                    need[i, d, e] = 1
        super().__init__(need)


# the guard

@pytest.mark.parametrize("kind", ["random", "opposite", "turncoat"])
@pytest.mark.parametrize("load", [0.25, 2.0])
@pytest.mark.parametrize("policy", ["lru", "priority_based", "forecast"])
def test_a_hostile_predictor_costs_a_percent_at_most(policy, load, kind):
    steps, s = routing(250), setting(load, 0.25, policy)
    base = simulate(steps, **s)
    assert base.seconds > 2000 * load * 1e-3  # what the entry of 8 loads is small beside
    run = Planned(Hostile(steps, kind))
    r = simulate(steps, prefetcher=run, **s)
    assert r.seconds <= 1.01 * base.seconds, r.seconds / base.seconds
    assert r.prefetched > 0 and not balance(run.planner.cache)


def test_without_the_guard_it_costs_more():
    "Or the test above would show nothing."
    steps, s = routing(250), setting(2.0, 0.25)
    base = simulate(steps, **s)
    free = simulate(steps, prefetcher=Planned(Hostile(steps, "opposite"), slack=float("inf")), **s)
    assert free.seconds > 1.02 * base.seconds


@pytest.mark.parametrize("policy", POLICIES)
def test_the_truth_is_worth_what_the_link_allows(policy):
    "And the guard does not stand in its way."
    steps, s = routing(120), setting(0.5, 0.25, policy)
    base = simulate(steps, **s)
    run = Planned(Known(steps))
    r = simulate(steps, prefetcher=run, **s)
    used = r.in_time + r.late
    assert r.seconds < 0.9 * base.seconds and r.wasted <= 0.05 * r.prefetched and r.in_time >= 0.9 * used
    assert abs((base.seconds - run.planner.saved) / r.seconds - 1) < 0.02  # the ghost's account is right
    assert run.planner.guard.on


def test_nothing_is_broken_whatever_it_is_told(monkeypatch):
    "Random probabilities, some of them not numbers; a threshold; slots that come and go. The tables are checked at every turn."
    steps, rng = routing(40), np.random.default_rng(0)

    def look(layer, experts):
        need = rng.random((3, 32)) ** rng.integers(1, 4)
        need[rng.random((3, 32)) < 0.05] = np.nan
        return None if rng.random() < 0.1 else need

    class Checked(Planned):
        def __call__(self, layer, experts):
            before = [int(x) for x in self.driver.cache.owner[self.driver.cache.pins > 0]]
            super().__call__(layer, experts)
            cache = self.driver.cache
            check(cache)
            assert before == [int(x) for x in cache.owner[cache.pins > 0]] and not balance(cache)
            return ()

    for slack in (0.005, float("inf")):
        for share, threshold in ((8, 1.0), (0.2, 0.8), (0.9, 1.0)):
            s = setting(1.0, share) | {"threshold": threshold}
            r = simulate(steps, prefetcher=Checked(look, slack=slack), **s)
            assert r.hits + r.misses == len(steps.experts)


# in the runtime

class Wrong:
    "Certain that what the routers of later layers will not choose is needed."
    ahead = 3

    def __init__(self, model):
        self.taps = find_taps(model)

    def __call__(self, layer, residual, routing):
        out = residual.new_zeros(len(residual), self.ahead, max(t.num_experts for t in self.taps))
        for d, tap in enumerate(self.taps[layer + 1 : layer + 1 + self.ahead]):
            out[:, d, : tap.num_experts] = 1
            out[:, d].scatter_(1, tap.route(residual).ids, 0)
        return out


def watched(flow, predictor, **planner):
    rt = flow.runtime
    return Foresight(rt, predictor.taps, predictor, planner=Planner(rt.cache, rt.layouts[0].nbytes, **planner))


@pytest.mark.parametrize("slack", [0.005, float("inf")])
def test_equal_bits_and_books_that_agree(slack):
    text = {"prompt": "She looked at the sea and", "max_new_tokens": 30, "do_sample": False}
    with ExpertFlow.from_pretrained("tiny-moe", gpu_memory_budget="100%", context=128) as flow:
        want = flow.generate(**text)
    with ExpertFlow.from_pretrained("tiny-moe", gpu_memory_budget="40%", context=128, paced_link="50MB/s") as flow:
        eyes = watched(flow, Wrong(flow.model), slack=slack)
        assert flow.generate(**text) == want
        count = flow.runtime.cache.count
        flow.runtime.reap(wait=True)
        assert not balance(flow.runtime.cache) and (count.prefetched > 30) >= (slack > 1)
        assert eyes.as_dict()["planner"]["state"] in ("guard on", "guard off")


def test_equal_bits_on_a_device(sim, tmp_path):
    path = write_checkpoint("olmoe", tmp_path, dtype="bfloat16")
    ref = on_cpu(path)
    ids = prompt(ref.config.vocab_size, 33, 3)
    want = generate(ref, {"input_ids": ids}, 30)
    sim.configure(delay=0.0001, link=2e9)
    with on_device(path, "75%") as flow:
        eyes = watched(flow, Wrong(flow.model), slack=float("inf"))
        got = generate(flow.model, {"input_ids": ids.to("sim")}, 30)
        assert all(same(a.cpu(), b) for a, b in zip(got, want, strict=True))
        assert flow.runtime.cache.count.prefetched > 0 and eyes.planner.pace.load > 0


def by_counts(driver):
    "A clock that the two drivers share: made of what has happened, which is the same in both."
    steps, loads, misses = (getattr(driver.cache.count, k) for k in ("steps", "loads", "misses"))
    return Measured(1e-3 * steps, 4e-4 * misses, 4e-4 * loads, loads * 1000)


@pytest.mark.parametrize("policy", ["lru", "priority_based", "arc"])  # forecast asks a predictor of paths, too
def test_the_runtime_and_the_simulator_plan_alike(monkeypatch, policy):
    "Told the same times, with loads that have arrived by the next layer: the same plans, hits, misses, bytes."
    turns, plans, replayed = [], [], []

    def carried(planner, driver, layer, experts, need, predicting=0.0):
        plan = carry_out(planner, driver, layer, experts, need)
        turns.append(need)
        plans.append(plan)
        return plan

    monkeypatch.setattr("expertflow.foresight.carry_out", carried)
    path = find_checkpoint("tiny-moe")
    with bench.load(path, "40%", eviction_policy=policy) as flow:
        rt, seen = flow.runtime, bench.Watched(flow)
        reap = rt.reap
        monkeypatch.setattr(rt, "reap", lambda wait=True: reap(wait=True), raising=False)
        monkeypatch.setattr(rt, "measured", lambda: by_counts(rt), raising=False)
        gate = Wrong(flow.model)
        gate.__class__ = type("Right", (Wrong,), {"__call__": lambda s, *a: 1 - Wrong.__call__(s, *a)})
        seen.calls.clear()  # the taps were found with a pass that the runtime was not in
        eyes = Foresight(rt, gate.taps, gate, planner=Planner(rt.cache, 1000))
        for n in ((24, 20), (9, 12)):
            bench.generate(flow, *n)
        rt.reap()
        real = bench.counts_of(flow)
        steps, like = seen.steps(), bench.like(flow)
        eyes.close()

    class Again(Planned):
        def attach(self, driver, nbytes):
            super().attach(driver, 1000)

        def __call__(self, layer, experts):
            replayed.append(carry_out(self.planner, self.driver, layer, experts, self.look(layer, experts)))
            return ()

    needs = iter(turns)
    monkeypatch.setattr(Filling, "measured", by_counts)
    again = Again(lambda layer, experts: next(needs))
    r = simulate(steps, prefetcher=again, compute=Compute(layer=1e-3), **like)
    assert replayed == plans and bench.counts_in(r) == real
    assert sum(len(p.start) for p in plans) > 20 and torch.is_grad_enabled()
