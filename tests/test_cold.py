"""Experts that stay on the host: named in four ways, no slots of their own, and not a bit of the output changed."""

import json

import pytest
import torch
from test_exact import generate, prompts, resident, same

from expertflow.config import Config, ConfigError, TraceError
from expertflow.flow import ExpertFlow, heat_of
from expertflow.recorder import record
from expertflow.testing import write_checkpoint
from expertflow.trace import TraceWriter, activations, cold_experts, load_trace

@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint("olmoe", tmp_path_factory.mktemp("cold"))  # 3 layers of 2 in 8 experts


@pytest.fixture(scope="module")
def trace(path, tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("trace") / "t", resident(path, "grouped_mm")
    with record(model, folder):
        generate(model, next(prompts(320, [12])), 8)
    return folder


def load(path, budget="100%", **kw):
    return ExpertFlow.from_pretrained(path, gpu_memory_budget=budget, context=128, batch=3, **kw)


def test_memory_that_is_saved(path, trace):
    "At a budget for everything, the slots are fewer by the cold ones less the guests of a step, and the report says so."
    with load(path) as whole, load(path, cold_experts=str(trace), cold_share=0.05) as flow:
        cold = cold_experts(load_trace(trace), 0.05).experts
        saved = whole.plan.slots - flow.plan.slots
        assert flow.cold == cold and saved == len(cold) - flow.plan.min_slots > 0
        assert flow.runtime.cache.n_slots == flow.plan.slots
        assert flow.ledger.held("device", "expert slots") == flow.plan.slots * flow.plan.slot_bytes
        assert f"{len(cold)} cold experts stay on the host" in str(flow.report())
        assert flow.report().as_dict()["plan"]["cold_experts"] == len(cold) and "cold experts" not in str(whole.report())
        assert all(flow.runtime.cache.slot_of[layer][e] < 0 for layer, e in cold)  # not preloaded
        assert flow.runtime.cache.count.loads == 24 - len(cold)


@pytest.mark.parametrize("policy", ["priority_based", "lru"])
@pytest.mark.parametrize("budget", ["100%", "50%", "0.001%"])
def test_equal_bits(budget, policy, path):
    "Also when the experts that are called cold are needed all the time."
    model = resident(path, "grouped_mm")
    cold = [[layer, e] for layer in range(3) for e in range(0, 8, 2)]
    with load(path, budget, cold_experts=cold, eviction_policy=policy) as flow:
        flow.runtime.poison = True
        for inputs in prompts(320, [1, 33]):
            a, b = generate(model, inputs, 6), generate(flow.model, inputs, 6)
            assert torch.equal(a[0], b[0]) and same(a[1], b[1])
        assert flow.runtime.cache.count.misses > 0


def test_cold_ones_go_first(path):
    "A cold guest is thrown out before anything else, however lately it was used; only an expected one stays."
    from expertflow.cache import choose_victims

    with load(path, "50%", cold_experts=[[0, 1]], preload=False) as flow:
        rt = flow.runtime
        for layer, experts in ((1, [0, 2]), (2, [3]), (0, [0, 1])):
            for _ in rt.bring(layer, experts): pass
        cache = rt.cache
        first = lambda: cache.owner[choose_victims(cache, cache.evictor, cache.count.steps, 1)].tolist()
        assert first() == [cache.flat(0, 1)]
        cache.expected[cache.flat(0, 1)] = True
        assert first() != [cache.flat(0, 1)]


def test_the_budget_changes(path, trace):
    "More memory does not bring the cold ones back."
    with load(path, "50%", cold_experts=str(trace), cold_share=0.05) as flow:
        flow.set_budget("100%")
        assert flow.plan.slots == flow.runtime.cache.n_slots == 24 - len(flow.cold) + flow.plan.min_slots
        inputs = next(prompts(320, [9]))
        assert torch.equal(generate(flow.model, inputs, 4)[0], generate(resident(path, "grouped_mm"), inputs, 4)[0])


def test_four_ways_to_name_them(path, trace, tmp_path):
    pairs = [[0, 1], [2, 7], [1, 0], [0, 5], [1, 5]]
    (tmp_path / "cold.json").write_text(json.dumps(pairs))
    for setting in (pairs, str(tmp_path / "cold.json"), tmp_path / "cold.json"):
        with load(path, cold_experts=setting) as flow:
            assert sorted(flow.cold) == sorted(map(tuple, pairs))
    assert Config.make(json.loads(json.dumps(Config.make(cold_experts=pairs).as_dict()))).cold_experts == tuple(map(tuple, pairs))
    with ExpertFlow.from_pretrained("tiny-moe", gpu_memory_budget="100%", cold_experts=0.02, context=64) as flow:
        heat = heat_of(flow.path)
        used = sum(heat[layer][e] for layer, e in flow.cold) / sum(map(sum, heat))
        assert flow.cold and 0.01 < used <= 0.02


@pytest.mark.parametrize("setting, error, message", [
    (0.02, TraceError, "no statistics"),
    ("nowhere", TraceError, "no trace.json"),
    ([[0, 8]], ConfigError, "no expert 8 in MoE layer 0"),
    ([[3, 0]], ConfigError, "no expert 0 in MoE layer 3"),
    ([[0]], ConfigError, "cold_experts=.*must be"),
    ([[0, -1]], ConfigError, "must be"),
    (0.9, ConfigError, "at most 0.5"),
    (True, ConfigError, "must be"),
    ({"a": 1}, ConfigError, "must be"),
])  # fmt: skip
def test_what_is_refused(setting, error, message, path):
    with pytest.raises(error, match=message): load(path, cold_experts=setting)


def test_damaged_lists_and_other_models(path, tmp_path):
    for text in ("{", "[[0]]", "[1]", '{"a": 1}', "null"):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(TraceError, match=r"c\.json: a JSON list"): load(path, cold_experts=str(tmp_path / "c.json"))
    with TraceWriter(tmp_path / "t", [64] * 3, 1) as w: w.append([[[0]] * 3])
    assert activations(load_trace(tmp_path / "t")).sum() == 3
    with pytest.raises(ConfigError, match="another model"): load(path, cold_experts=str(tmp_path / "t"))
