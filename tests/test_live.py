"Settings change while the model generates: at the next layer-step, all or nothing, with the same bits as long as it is strict."

import itertools
import json
import random
import threading
import time

import numpy as np
import pytest
import torch
from test_exact import generate, prompts, resident, same

import expertflow.flow
import expertflow.runtime
from expertflow.cache import ABSENT, ExpertCache, Successor, admit, balance, check, choose_victims, done, end, loaded
from expertflow.cli import main
from expertflow.config import POLICIES, BudgetError, ConfigError, ExpertFlowError
from expertflow.evictor import ARC, LRU, Frequency, make_evictor, weights_for
from expertflow.flow import ExpertFlow
from expertflow.forecast import PredictedForecast
from expertflow.live import FIXED, LIVE, LiveFile
from expertflow.testing import write_checkpoint, write_tokenizer

pytest_plugins = ["simdev.plugin"]
MODES = ("grouped_mm", "eager")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tokenizer(write_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"), dtype="bfloat16"))


def load(path, budget="50%", **kw):
    return ExpertFlow.from_pretrained(path, **({"gpu_memory_budget": budget, "context": 400, "batch": 3} | kw))


def ids(n=1, seed=0):
    return torch.randint(3, 200, (1, n), generator=torch.Generator().manual_seed(seed))


def run(flow, n=12, prompt=5):
    return flow.model.generate(ids(prompt), do_sample=False, min_new_tokens=n, max_new_tokens=n)


# ---- each live setting does something ----


def sets_gpu_memory_budget(flow):
    flow.set(gpu_memory_budget="25%")
    assert flow.runtime.cache.n_slots == flow.plan.slots == 6


def sets_context(flow):
    before = flow.ledger.held("device", "KV cache")
    flow.set(context=800)
    assert flow.ledger.held("device", "KV cache") == 2 * before
    run(flow, 700)


def sets_batch(flow):
    before = flow.ledger.held("device", "KV cache")
    flow.set(batch=6)
    assert flow.ledger.held("device", "KV cache") == 2 * before


def sets_token_block_size(flow):
    steps = []
    for size in (None, 8, 20):
        flow.set(token_block_size=size)
        before = flow.runtime.cache.count.steps
        run(flow, 1, prompt=40)
        steps.append(flow.runtime.cache.count.steps - before)
    layers = len(flow.runtime.layouts)
    assert steps == [layers, 5 * layers, 2 * layers]


def sets_eviction_policy(flow):
    flow.set(eviction_policy="lfu")
    assert type(flow.runtime.cache.evictor) is Frequency
    flow.set(eviction_policy="arc")
    assert type(flow.runtime.cache.evictor) is ARC and flow.runtime.cache.moved == flow.runtime.cache.evictor.moved
    run(flow)


def sets_priority_weights(flow):
    run(flow)
    cache = flow.runtime.cache
    flow.set(priority_weights={"recency": 1.0})
    flow.set(gpu_memory_budget="40%")  # a few evictions more
    run(flow)
    last = {int(i): now for now, some in cache.past for i in some}
    oldest = sorted(cache.owner[cache.owner != ABSENT].tolist(), key=lambda i: last.get(i, -1))
    assert cache.owner[choose_victims(cache, cache.evictor, cache.count.steps, 3)].tolist() == oldest[:3]


def sets_eviction_threshold(flow):
    flow.set(eviction_threshold=0.5, warmup_steps=0)
    run(flow)
    assert len(flow.runtime.cache.free) >= 6
    flow.set(eviction_threshold=1.0)
    run(flow)
    assert not flow.runtime.cache.free


def sets_warmup_steps(flow):
    flow.set(eviction_threshold=0.5, warmup_steps=10**6)
    run(flow)
    assert not flow.runtime.cache.free
    flow.set(warmup_steps=0)
    run(flow, 1)
    assert len(flow.runtime.cache.free) >= 6


def sets_prediction_lookahead(flow):
    count, dense = flow.runtime.cache.count, flow.plan.dense
    run(flow)
    assert count.prefetched == 0 and flow.report().prediction is None
    flow.set(prediction_lookahead=2, gpu_memory_budget="40%")
    run(flow)
    seen = flow.report().prediction
    assert seen["lookahead"] == 2 and seen["steps"] > 0 and flow.plan.dense > dense
    assert flow.ledger.held("device", "resident weights") == flow.plan.dense
    flow.set(prediction_lookahead=0)
    before = count.prefetched
    run(flow)
    assert count.prefetched == before and flow.runtime.prefetcher is None and flow.plan.dense == dense
    assert flow.ledger.held("device", "resident weights") == dense and flow.report().prediction is None


def sets_prediction_model_path(flow):
    flow.set(prediction_model_path="gate")
    run(flow)
    assert flow.report().prediction["predictor"] == "gate" and flow.foresight is flow.runtime.prefetcher


def sets_forecast_model_path(flow):
    flow.set(forecast_model_path="routing")
    with ExpertFlow.from_pretrained("tiny-moe", gpu_memory_budget="50%") as tiny:
        tiny.set(eviction_policy="forecast")
        run(tiny, 4)
        assert tiny.report().forecast["passes"] == 4 and tiny.runtime.cache.evictor.trial.policy.forecast is tiny.sight.forecast
        tiny.set(forecast_model_path="routing")
        run(tiny, 4)
        assert tiny.report().forecast is None and tiny.sight is None and not isinstance(
            tiny.runtime.cache.evictor.trial.policy.forecast, PredictedForecast)  # fmt: skip


def sets_strict(flow):
    flow.set(gpu_memory_budget="25%", tolerance=0.9)
    run(flow)
    assert flow.runtime.cache.count.skipped == 0 == flow.runtime.skipped.rows
    flow.set(strict=False)
    run(flow)
    seen = flow.runtime.cache.count.skipped
    assert seen > 0
    flow.set(strict=True)
    run(flow)
    assert flow.runtime.cache.count.skipped == seen


def sets_strict_layers(flow):
    flow.set(gpu_memory_budget="25%", tolerance=0.9, strict=False, strict_layers=[0, 2])
    assert list(flow.runtime.tolerance) == [1]
    run(flow, 10, prompt=5)
    assert flow.runtime.skipped.rows == 5 + 9


def sets_tolerance(flow):
    flow.set(gpu_memory_budget="25%", strict=False, tolerance=0.0)
    run(flow)
    assert flow.runtime.cache.count.skipped == 0 < flow.runtime.skipped.rows
    flow.set(tolerance=0.6)
    run(flow)
    assert flow.runtime.cache.count.skipped > 0


def sets_cpu_memory_budget(flow):
    run(flow)
    moved, before = flow.runtime.executor.moved, flow.host_slots
    assert before == 24 and moved.host_misses <= 24
    flow.set(gpu_memory_budget="25%", cpu_memory_budget="20%")
    assert flow.host_slots == len(flow.runtime.executor.host.rows) == 5
    assert flow.ledger.snapshot()["host"]["reservations"] == {"expert cache": 5 * flow.plan.slot_bytes}
    assert flow.ledger.capacity("host") == 5 * flow.plan.slot_bytes
    missed = moved.host_misses
    run(flow)
    assert moved.host_misses > missed + 24
    flow.set(cpu_memory_budget="100%")
    run(flow)
    missed = moved.host_misses
    run(flow)
    assert moved.host_misses == missed and flow.ledger.capacity("host") == 24 * flow.plan.slot_bytes


BEHIND_A_DEVICE = ["cpu_memory_budget"]  # settings that do something only there


def sets_host_compute(flow):
    flow.set(host_compute="auto")
    assert flow.runtime.host_compute == "auto"


def heeded(flow, key):
    globals()[f"sets_{key}"](flow)
    check(flow.runtime.cache)
    assert flow.settings.changes[-1].settings and flow.settings.version > 0


@pytest.mark.parametrize("key", [key for key in LIVE if key not in BEHIND_A_DEVICE])
def test_each_live_setting_is_heeded(path, key):
    with load(path) as flow:
        heeded(flow, key)


@pytest.mark.parametrize("key", BEHIND_A_DEVICE)
def test_each_live_setting_of_a_device_is_heeded(sim, path, key):
    with load(path) as flow:
        assert flow.device.type == "sim"
        heeded(flow, key)


def test_the_host_budget_in_a_file(sim, path, tmp_path):
    "As `--live` follows it: a size, one that cannot be, said once, and another."
    with load(path) as flow:
        live = LiveFile(tmp_path / "live.toml", flow.set)
        for text, n, wrong in (("30%", 7, None), ("0.001%", 7, "the host tier needs at least"), ("50%", 12, None)):
            live.path.write_text(f'cpu_memory_budget = "{text}"')
            said = live.poll()
            assert (wrong in said if wrong else said is None) and live.poll() is None
            assert flow.host_slots == n == len(flow.runtime.executor.host.rows)


def test_there_is_no_host_tier_on_the_cpu(path):
    "The device is the host. Said again, a value is no change."
    with load(path, cpu_memory_budget="1GB") as flow:
        run(flow)
        before = state(flow)
        with pytest.raises(ConfigError, match="cpu_memory_budget: no host tier on the CPU, where the device is the host"):
            flow.set(cpu_memory_budget="2GB", eviction_policy="lru", gpu_memory_budget="25%")
        assert state(flow) == before and flow.host_slots == 0
        flow.set(cpu_memory_budget="1000MB", eviction_policy="lru")
        assert flow.config.eviction_policy == "lru"
        run(flow)


@pytest.mark.parametrize("key", FIXED)
def test_each_fixed_setting_says_why_not(path, key):
    other = {"model_path": "tiny-moe", "system_reserve": "1MB", "device": "cuda", "dtype": "float32",
             "experts_implementation": "eager", "preload": False, "cold_experts": 0.01, "cold_share": 0.1, "io_threads": 1,
             "load_timeout": 3.0, "paced_link": "1GB/s"}  # fmt: skip
    with load(path) as flow:
        with pytest.raises(ConfigError, match=f"{key}=.* cannot change .* while the model is loaded .*; load the model again"):
            flow.set(**{key: other[key], "eviction_policy": "lru"})
        assert flow.set(**{key: getattr(flow.config, key), "eviction_policy": "arc"}).eviction_policy == "arc"
        assert flow.settings.version == 1


# ---- when ----


@pytest.mark.parametrize("mode", MODES)
def test_in_effect_at_the_very_next_layer_step(path, mode):
    "The thread that generates is held inside a layer-step; what is set then is there at the next one, and not before."
    with load(path, experts_implementation=mode) as flow:
        rt, seen, inside, go_on = flow.runtime, [], threading.Event(), threading.Event()

        def prefetcher(layer, experts):
            seen.append((rt.cache.count.steps, type(rt.cache.evictor), rt.cache.n_slots))
            if len(seen) == 7:
                inside.set()
                go_on.wait(20)
            return ()

        rt.prefetcher = prefetcher
        generating = threading.Thread(target=run, args=(flow,), daemon=True)
        generating.start()
        assert inside.wait(20)
        setting = threading.Thread(target=flow.set, kwargs={"eviction_policy": "lru", "gpu_memory_budget": "75%"}, daemon=True)
        setting.start()
        while not rt.jobs:
            pass
        assert type(rt.cache.evictor) is not LRU and flow.settings.version == 0
        go_on.set()
        setting.join(20)
        generating.join(20)
        assert not setting.is_alive() and not generating.is_alive()
        rt.prefetcher = None
        step = seen[6][0]
        assert [x[1] is LRU for x in seen] == [i > 6 for i in range(len(seen))]
        assert [x[2] for x in seen] == [12] * 7 + [18] * (len(seen) - 7)
        assert flow.settings.changes[-1].step == step and seen[7][0] == step + 1


def test_many_wait_for_one_layer_step(path):
    "All that was left while a layer-step ran is done before the next one, in the order in which it came."
    with load(path) as flow:
        rt, order, inside, go_on = flow.runtime, [], threading.Event(), threading.Event()

        def prefetcher(layer, experts):
            if not inside.is_set():
                inside.set()
                go_on.wait(20)
            return ()

        rt.prefetcher = prefetcher
        generating = threading.Thread(target=run, args=(flow,), daemon=True)
        generating.start()
        assert inside.wait(20)
        step, threads = rt.cache.count.steps, []
        for i in range(5):
            work = lambda i=i: order.append((i, rt.cache.count.steps))
            threads.append(threading.Thread(target=rt.between, args=(work,), daemon=True))
            threads[-1].start()
            while len(rt.jobs) <= i:
                pass
        go_on.set()
        for t in [*threads, generating]:
            t.join(20)
        rt.prefetcher = None
        assert order == [(i, step) for i in range(5)]


def test_from_the_thread_that_generates(path):
    "Between two layer-steps, in a callback of transformers: done at once."
    with load(path) as flow:
        budgets, slots = itertools.cycle(["25%", "100%"]), []

        def change(input_ids, scores):
            flow.set(gpu_memory_budget=next(budgets))
            slots.append(flow.runtime.cache.n_slots)
            return scores

        want = flow.model.generate(ids(), do_sample=False, min_new_tokens=6, max_new_tokens=6)
        got = flow.model.generate(ids(), do_sample=False, min_new_tokens=6, max_new_tokens=6, logits_processor=[change])
        assert torch.equal(got, want) and slots == [6, 24] * 3 and flow.generations[-1].changes == 6


def test_a_waiting_change_can_be_given_up(path, monkeypatch):
    "Ctrl-C while it waits: it does not happen later."
    with load(path) as flow:
        rt, happened, held, go_on = flow.runtime, [], threading.Event(), threading.Event()

        def holds():
            with rt.lock:
                held.set()
                go_on.wait(20)

        def interrupt(*_):
            raise KeyboardInterrupt

        other = threading.Thread(target=holds, daemon=True)
        other.start()
        held.wait(20)
        monkeypatch.setattr("concurrent.futures.wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rt.between(lambda: happened.append(1))
        monkeypatch.undo()
        go_on.set()
        other.join(20)
        run(flow)
        assert not happened and not rt.jobs


def test_what_work_raises_is_raised_where_it_was_asked_for(path):
    with load(path) as flow:
        with pytest.raises(TimeoutError, match="mine"):
            flow.runtime.between(lambda: (_ for _ in ()).throw(TimeoutError("mine")))
        run(flow)


# ---- all or nothing ----


def state(flow):
    cache = flow.runtime.cache
    return (flow.settings.now, flow.plan, cache.n_slots, cache.evictor, cache.threshold, cache.keep_free, cache.warmup_steps,
            flow.foresight, flow.runtime.prefetcher, dict(flow.runtime.tolerance), flow.runtime.host_compute, flow.inventory,
            flow.model.generation_config.prefill_chunk_size, flow.requests.block, flow.ledger.capacity("device"),
            flow.ledger.snapshot()["device"]["reservations"], list(flow.settings.changes))  # fmt: skip


BAD = {
    "unknown": ({"policy": "lru"}, ConfigError, "unknown setting 'policy'; did you mean 'eviction_policy'"),
    "self": ({"self": 1}, ConfigError, "unknown setting 'self'"),
    "value": ({"eviction_policy": "lur"}, ConfigError, "eviction_policy='lur': unknown value; did you mean 'lru'"),
    "weights": ({"priority_weights": {"recency": 0.5}}, ConfigError, "the weights sum to 0.5; make them sum to 1"),
    "fixed": ({"device": "cuda"}, ConfigError, "cannot change from"),
    "layer": ({"strict": False, "strict_layers": [0, 3]}, ConfigError, "no MoE layer 3, there are 0 to 2"),
    "budget": ({"gpu_memory_budget": "1MB"}, BudgetError, "it needs at least"),
    "more than there is": ({"gpu_memory_budget": "900TB"}, BudgetError, "more than there is"),
    "no file": ({"prediction_model_path": "/nowhere/p.safetensors"}, ExpertFlowError, "nowhere"),
    "context": ({"context": 10**7}, BudgetError, "it needs at least .*lower context"),
}


@pytest.mark.parametrize("why", BAD)
def test_refused_as_a_whole(path, why):
    bad, kind, text = BAD[why]
    with load(path, budget="2GB" if why == "context" else "50%") as flow:
        run(flow)
        before, good = state(flow), {"eviction_threshold": 0.7, "warmup_steps": 3, "tolerance": 0.3, "token_block_size": 16}
        with pytest.raises(kind, match=text):
            flow.set(**bad, **good)
        assert state(flow) == before
        run(flow)
        flow.set(**good)
        assert flow.settings.version == 1


def test_out_of_memory_changes_nothing(path, monkeypatch):
    "The last thing that can go wrong, when everything has been checked."
    with load(path) as flow:
        want, before = run(flow), state(flow)

        def full(n):
            raise MemoryError("no more")

        monkeypatch.setattr(flow.runtime.slab, "resize", full)
        with pytest.raises(MemoryError):
            flow.set(gpu_memory_budget="100%", eviction_policy="arc", prediction_lookahead=2, strict=False)
        monkeypatch.undo()
        assert state(flow) == before and torch.equal(run(flow), want)


def test_a_predictor_that_does_not_fit_is_refused_with_the_numbers(path):
    "A budget in bytes that is exactly the smallest: no room for a predictor, and it says how much there would have to be."
    with load(path) as flow:
        least = flow.plan.smallest_budget
    with load(path, budget=f"{least + 60_000_000}B", system_reserve=f"{flow.plan.system}B") as flow:
        flow.set(gpu_memory_budget=f"{flow.plan.smallest_budget}B")
        before = state(flow)
        with pytest.raises(BudgetError, match="B"):
            flow.set(prediction_lookahead=2, eviction_policy="arc")
        assert state(flow) == before
        flow.set(gpu_memory_budget=f"{flow.plan.smallest_budget + 10_000_000}B")
        flow.set(prediction_lookahead=2)
        slots = flow.runtime.cache.n_slots
        flow.set(prediction_lookahead=0)
        assert flow.runtime.cache.n_slots >= slots and flow.foresight is None


def test_a_predictor_sees_no_further_than_it_sees():
    with ExpertFlow.from_pretrained("tiny-moe", gpu_memory_budget="50%") as flow:
        flow.set(prediction_lookahead=2)
        assert flow.report().prediction["predictor"].endswith("tiny-moe.safetensors")
        eyes = flow.foresight
        with pytest.raises(ConfigError, match="prediction_lookahead=9: this predictor looks 1 to 4 layers ahead"):
            flow.set(prediction_lookahead=9, eviction_policy="lru")
        assert flow.foresight is eyes and flow.runtime.prefetcher is eyes and flow.config.eviction_policy == "priority_based"


def test_requests_under_way_keep_their_memory(path):
    "A budget that would have to take it away from them is refused, and the rest of the change with it."
    with load(path) as flow, flow.requests.one():
        flow.requests.admit(3, 400, 400)
        before = state(flow)
        with pytest.raises(BudgetError, match=r"context=8.*requests under way hold"):
            flow.set(gpu_memory_budget="0.001%", context=8, batch=1, eviction_policy="lru")
        assert state(flow) == before


def test_a_closed_model_is_not_changed(path):
    with load(path) as flow:
        pass
    with pytest.raises(ExpertFlowError, match="has been closed"):
        flow.set(eviction_policy="lru")


# ---- hammered ----

STRICT = {
    "gpu_memory_budget": ["0.001%", "25%", "50%", "75%", "100%"],
    "eviction_policy": list(POLICIES),
    "priority_weights": [{"recency": 1.0}, {"prediction_prob": 0.5, "transfer_cost": 0.5}],
    "eviction_threshold": [0.3, 0.9, 1.0, None],
    "warmup_steps": [0, 10**6, None],
    "prediction_lookahead": [0, 1, 2, "auto", None],
    "prediction_model_path": ["gate", None],
    "context": [400, 500],
    "tolerance": [0.0, 0.5],
    "strict_layers": [[], [1], [7]],  # the last one is refused
}
LOOSE = STRICT | {"strict": [True, False], "token_block_size": [None, 8], "host_compute": ["never", "auto"]}


def checked(flow):
    "Has the invariants looked at after every layer-step; the list of their number."
    rt, bring, ordered, steps = flow.runtime, flow.runtime.bring, flow.runtime.ordered, []

    def look():
        with rt.lock:
            check(rt.cache)
            assert balance(rt.cache) == 0 and rt.slab.n_slots == rt.cache.n_slots
            steps.append(rt.cache.count.steps)

    def brings(*args):
        yield from bring(*args)
        look()

    class Ordered:
        def __init__(self, *args):
            self.inner = ordered(*args)

        def __enter__(self):
            return self.inner.__enter__()

        def __exit__(self, *error):
            self.inner.__exit__(*error)
            look()

    rt.bring, rt.ordered = brings, Ordered
    return steps


class Hammer:
    "Two threads that set things at random until the context is left."

    def __init__(self, flow, choices):
        self.flow, self.choices, self.stop = flow, choices, False
        self.refused, self.wrong = [], []
        self.threads = [threading.Thread(target=self.work, args=(i,), daemon=True) for i in range(2)]

    def work(self, seed):
        rng = random.Random(seed)
        while not self.stop:
            keys = rng.sample(list(self.choices), rng.randint(1, 3))
            try:
                self.flow.set(**{k: rng.choice(self.choices[k]) for k in keys})
            except (ConfigError, BudgetError) as e:
                self.refused.append(str(e))
            except BaseException as e:
                self.wrong.append(e)
                return

    def __enter__(self):
        for t in self.threads:
            t.start()
        return self

    def __exit__(self, *_):
        self.stop = True
        for t in self.threads:
            t.join(30)
        assert not any(t.is_alive() for t in self.threads), "a thread that sets things waits for ever"
        if self.wrong:
            raise self.wrong[0]


@pytest.mark.parametrize("mode", MODES)
def test_hammered_while_strict(path, mode):
    "Everything that does not concern strictness, from two threads at random: the bits of the resident model."
    ref = resident(path, mode)
    wants = [(p, generate(ref, p, 12)) for p in prompts(ref.config.vocab_size, (1, 33))]
    with load(path, experts_implementation=mode) as flow:
        steps, versions, policies = checked(flow), [], set()
        flow.runtime.poison = True
        flow.settings.subscribe(lambda now: versions.append(now.version))
        with Hammer(flow, STRICT) as hammer:
            while flow.settings.version < 150 or len(steps) < 500:
                for p, want in wants:
                    assert all(same(a, b) for a, b in zip(generate(flow.model, p, 12), want, strict=True)), (flow.config, p)
                    policies.add(flow.config.eviction_policy)
        assert versions == sorted(set(versions)) and versions[-1] == flow.settings.version
        assert len(policies) > 1 and any("no MoE layer 7" in x for x in hammer.refused)
        assert sum(g.changes for g in flow.generations) > 50 and flow.runtime.cache.count.skipped == 0
        assert flow.ledger.held("device", "expert slots") == flow.runtime.cache.n_slots * flow.plan.slot_bytes
        assert flow.ledger.held("device", "resident weights") == flow.plan.dense and not flow.requests.taken


def test_hammered_while_not_strict(path):
    "With tolerances coming and going: no invariant breaks, and strict again it has the old bits again."
    ref = resident(path, "grouped_mm")
    wants = [(p, generate(ref, p, 12)) for p in prompts(ref.config.vocab_size, (1, 33))]
    with load(path) as flow:
        steps = checked(flow)
        with Hammer(flow, LOOSE):
            while flow.settings.version < 100 or len(steps) < 500 or not flow.runtime.skipped.experts:
                for p, _ in wants:
                    assert torch.isfinite(generate(flow.model, p, 12)[1]).all()
        flow.set(strict=True, token_block_size=None)
        for p, want in wants:
            assert all(same(a, b) for a, b in zip(generate(flow.model, p, 12), want, strict=True))


def test_hammered_on_a_device(sim, tmp_path):
    "The same with streams, events and a host tier: equal bits, and the checker of missing waits is content."
    from test_device import decode, offloaded, prompt
    from test_device import resident as on_cpu
    from test_device import same as alike

    path = write_checkpoint("qwen3_moe", tmp_path, dtype="bfloat16")
    ref = on_cpu(path)
    some = prompt(ref.config.vocab_size)
    want = decode(ref, some, 40)
    sim.configure(delay=0.0001)
    choices = {k: v for k, v in STRICT.items() if k != "context"}
    choices["cpu_memory_budget"] = ["20%", "60%", "100%", "auto", "0.001%"]
    with offloaded(path, "50%") as flow, Hammer(flow, choices) as hammer:
        while flow.settings.version < 40 or not any("the host tier needs at least" in x for x in hammer.refused):
            assert alike(decode(flow.model, some.to("sim"), 40), want), flow.config
    assert flow.ledger.held("host", "expert cache") == flow.host_slots * flow.plan.slot_bytes
    assert any("cpu_memory_budget" in x.settings for x in flow.settings.changes)


# ---- a successor ----


def test_a_successor_misses_less_than_a_newcomer(shared):
    "On recorded decoding, in the passes after a switch: a policy that was told the last passes against one that was not."
    routes = np.load(shared / "data/routing/gpt-oss-20b/gpt_oss_20b_decode.npz")["experts"]
    L, E, at = routes.shape[1], 32, 60

    def misses(x, told):
        sizes, seen = [[1] * E] * L, []
        cache = ExpertCache([E] * L, L * E // 2, make_evictor("lru", sizes))
        for t, row in enumerate(x):
            if t == at:
                heir = Successor(make_evictor("priority_based", sizes))
                if told:
                    heir.take_over(cache)
                cache.evictor, cache.moved = heir.evictor, heir.moved
            seen.append(cache.count.misses)
            for layer in range(L):
                step = cache.begin(layer, np.unique(row[layer]).tolist())
                while step.misses or step.pinned:
                    for load in admit(cache, step):
                        loaded(cache, load)
                    for e in list(step.pinned):
                        done(cache, step, e)
                end(cache, step)
        check(cache)
        return seen[-1] - seen[at]

    blocks = [routes[s : s + at + 21] for s in range(1000, 9000, 1000)]
    told, new = (sum(misses(x, told) for x in blocks) for told in (True, False))
    assert told < 0.9 * new, (told, new)


# ---- where it shows ----


def test_two_panels_agree(path):
    "Each shows what the box says, whoever set it."
    with load(path) as flow:
        shown = [[], []]
        for panel in shown:
            flow.settings.subscribe(lambda now, panel=panel: panel.append((now.version, now.config.eviction_policy)))
        threads = [threading.Thread(target=lambda p=p: [flow.set(eviction_policy=p) for _ in range(10)]) for p in ("lru", "arc")]
        for t in threads:
            t.start()
        run(flow, 40)
        for t in threads:
            t.join(20)
        assert shown[0][-1] == shown[1][-1] == (flow.settings.version, flow.config.eviction_policy)
        assert all(panel == sorted(panel) for panel in shown)


@pytest.mark.parametrize("use", ["generate", "report"])
def test_a_predictor_that_is_switched_off_just_now(use, path):
    "Another thread takes it off between the look whether there is one and its use."
    with load(path, prediction_lookahead=1) as flow:
        eyes = [flow.foresight]

        class Switched(ExpertFlow):
            foresight = property(lambda self: eyes.pop() if eyes else None)

        flow.__class__ = Switched
        assert run(flow).shape == (1, 17) if use == "generate" else flow.report().prediction
        assert not eyes
        flow.__class__ = ExpertFlow


def test_told_again_after_ctrl_c_in_a_listener(path):
    with load(path) as flow:
        def pressed(now):
            raise KeyboardInterrupt

        leave, told = flow.settings.subscribe(pressed), []
        flow.settings.subscribe(lambda now: told.append(now.version))
        with pytest.raises(KeyboardInterrupt):
            flow.set(warmup_steps=7)
        leave()
        flow.set(warmup_steps=8)
        assert told == [2] and flow.config.warmup_steps == 8


def test_reports_show_what_is_in_force_and_that_it_changed(path):
    with load(path) as flow:
        assert flow.report().changes == [] and "changed" not in str(flow.report())
        flow.set(eviction_policy="lru", gpu_memory_budget="25%")
        run(flow)
        flow.set(prediction_lookahead=2)
        r = flow.report()
        assert r.config["eviction_policy"] == "lru" and r.config["eviction_threshold"] == flow.runtime.cache.threshold
        assert [x["version"] for x in r.changes] == [1, 2]
        assert r.changes[0]["settings"]["eviction_policy"] == ("priority_based", "lru")
        assert "changed    2 times, last after " in str(r) and "prediction_lookahead None -> 2" in str(r)
        json.dumps(r.as_dict())


def test_the_command_line_follows_a_file(path, tmp_path, capsys, monkeypatch):
    "Changed from outside while it writes: good, bad, good again. The text is that of the whole model."
    live, turns = tmp_path / "live.toml", iter(["tolerance = 9", 'eviction_policy = "lru"', 'gpu_memory_budget = "25%"', ""])
    live.write_text('eviction_policy = "arc"\n')
    stream, seen = expertflow.flow.stream_text, []

    def writes(flow, *args):
        for piece in stream(flow, *args):
            seen.append((flow.config.eviction_policy, flow.runtime.cache.n_slots))
            if (text := next(turns, "")):
                live.write_text(text + "\n")
            yield piece

    args = ["generate", "hello", "--model", str(path), "--gpu-memory", "50%", "--context", "400", "--max-new-tokens", "30"]
    assert main(args) == 0
    want = capsys.readouterr().out
    monkeypatch.setattr(expertflow.flow, "stream_text", writes)
    assert main([*args, "--live", str(live)]) == 0
    said = capsys.readouterr()
    assert said.out == want and len(seen) > 5
    assert seen[0] == ("arc", 12) and seen[-1] == ("lru", 6)
    assert f"{live}: tolerance=9: must be a number at least 0 and at most 1; the settings stay as they were" in said.err
    assert said.err.count("expertflow:") == 1
    live.write_text("nonsense = = 1")
    assert main([*args, "--live", str(live)]) == 2  # wrong from the start: said at once, nothing is written
    assert main([*args, "--live", str(tmp_path / "none.toml")]) == 2


@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.parametrize(("link", "recency"), [("0.05GB/s", 0.6), (None, None)])
def test_weights_that_follow_the_link(link, recency, preload, path):
    "The article's rule by the measured rate, at loading and when asked for later; a slow link leans on recency."
    with load(path, priority_weights="auto", paced_link=link, preload=preload) as flow:
        cache, executor = flow.runtime.cache, flow.runtime.executor
        assert dict(flow.weights) == weights_for(executor.carried / executor.busy) and flow.config.priority_weights == "auto"
        assert recency is None or flow.weights["recency"] == pytest.approx(recency)
        assert (cache.evictor.w_p, cache.evictor.w_r) == (flow.weights["prediction_prob"], flow.weights["recency"])
        assert flow.report().config["priority_weights"] == flow.weights
        flow.set(priority_weights={"recency": 1.0})
        assert cache.evictor.w_r == 1 == flow.weights["recency"]
        flow.set(priority_weights="auto")
        assert dict(flow.weights) == weights_for(executor.carried / executor.busy)
        assert cache.evictor.w_r == flow.weights["recency"]


def test_ctrl_c_while_another_thread_makes_the_change(path, monkeypatch):
    "It happens all the same, and what is in force is what is said to be."
    begun, told, wait, move = threading.Event(), [], expertflow.runtime.futures.wait, expertflow.flow.move_budget

    def slow(*args):
        begun.set()
        time.sleep(0.3)
        return move(*args)

    def interrupted(*args):
        if begun.is_set():
            monkeypatch.setattr(expertflow.runtime.futures, "wait", wait)
            raise KeyboardInterrupt
        return wait(*args)

    with load(path) as flow:
        rt, holds = flow.runtime, threading.Event()

        def busy():  # as a layer-step is
            with rt.lock:
                holds.set()
                while not rt.jobs:
                    time.sleep(0.001)
                rt.catch_up()

        flow.settings.subscribe(lambda now: told.append(now.config.gpu_memory_budget))
        monkeypatch.setattr(expertflow.flow, "move_budget", slow)
        monkeypatch.setattr(expertflow.runtime.futures, "wait", interrupted)
        other = threading.Thread(target=busy)
        other.start()
        holds.wait()
        with pytest.raises(KeyboardInterrupt):
            flow.set(gpu_memory_budget="25%")
        other.join()
        assert rt.cache.n_slots == flow.plan.slots == 6 and flow.config.gpu_memory_budget == "25%" and flow.settings.version == 1
        flow.set(gpu_memory_budget="50%")
        assert told == ["25%", "50%"] and flow.settings.version == 2 and rt.cache.n_slots == 12
