"""The promises of test_device.py on a real accelerator; skipped where there is none.

The reference is the resident model on the same device, with the same experts implementation. test_gpu_simulated.py runs all of
this on the simulated device, so that it is known to run.
"""

import gc
import itertools
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM

from expertflow.evictor import weights_for
from expertflow.flow import ExpertFlow
from expertflow.runtime import Fetched
from expertflow.testing import write_checkpoint

pytestmark = pytest.mark.gpu
EAGER = {"attn_implementation": "eager"}
WIDER = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
FAMILIES = ["olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe"]


@pytest.fixture
def device():
    return torch.accelerator.current_accelerator()


def load(path, device, mode):
    kw = {"dtype": "auto", "experts_implementation": mode, "device_map": {"": device}}
    return AutoModelForCausalLM.from_pretrained(path, **EAGER, **kw).eval()


def offloaded(path, budget="0.001%", model_kwargs=EAGER, **kw):
    settings = {"gpu_memory_budget": budget, "cpu_memory_budget": "100%", "context": 512, "system_reserve": "1MB"} | kw
    flow = ExpertFlow.from_pretrained(path, model_kwargs=model_kwargs, **settings)
    assert flow.device.type != "cpu" and flow.runtime.on_device
    flow.runtime.poison = True
    return flow


def prompt(model, device, n=33, batch=2):
    return torch.randint(3, model.config.vocab_size, (batch, n), generator=torch.Generator().manual_seed(n)).to(device)


@torch.no_grad()
def decode(model, ids, n, between=lambda i: None):
    "Greedy tokens [batch, n] and logits of all steps; not by `generate`, which has transformers use other kernels for decoding."
    tokens, logits, cache = [ids], [], None
    for i in range(n):
        out = model(tokens[-1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits[:, -1])
        tokens.append(logits[-1].argmax(-1, keepdim=True))
        between(i)
    return torch.cat(tokens[1:], 1).cpu(), torch.stack(logits).cpu()


def same(a, b):
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("mode", ["eager", "grouped_mm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_bits(tmp_path, device, family, dtype, mode):
    "A prompt and decoding at four budgets, with a host tier that has to go to disk."
    path = write_checkpoint(family, tmp_path, dtype=dtype)
    ref = load(path, device, mode)
    ids = prompt(ref, device)
    with torch.no_grad():
        whole = ref(ids).logits
    want = decode(ref, ids, 24)
    for budget in ("100%", "50%", "25%", "0.001%") if device.type != "sim" else ("50%", "0.001%"):  # all: test_device.py
        with offloaded(path, budget, cpu_memory_budget="30%", batch=2, experts_implementation=mode) as flow, torch.no_grad():
            assert same([flow.model(ids).logits], [whole]), budget
            assert same(decode(flow.model, ids, 24), want), budget


def test_generate_is_equal(tmp_path, device):
    "By `generate`, which leaves the eager loop of experts as it is."
    path = write_checkpoint("olmoe", tmp_path, dtype="bfloat16")
    ref = load(path, device, "eager")
    ids, length = prompt(ref, device), {"max_new_tokens": 48, "do_sample": False}
    with offloaded(path, "50%", batch=2, experts_implementation="eager") as flow:
        assert torch.equal(flow.model.generate(ids, **length), ref.generate(ids, **length))


@pytest.mark.parametrize("mode", ["eager", "grouped_mm"])
def test_budget_changes_between_tokens(tmp_path, device, mode):
    "Grow, shrink to the minimum, back, while experts are prefetched that may be none of those needed."
    path = write_checkpoint("qwen3_moe", tmp_path, dtype="bfloat16")
    ref = load(path, device, mode)
    ids = prompt(ref, device)
    want = decode(ref, ids, 60)
    budgets, slots = itertools.cycle(["100%", "0.001%", "50%", "25%", "75%"]), set()
    with offloaded(path, "50%", batch=2, experts_implementation=mode) as flow:
        rt = flow.runtime
        rt.prefetcher = lambda layer, experts: [((layer + 1) % len(rt.cache.num_experts), range(4))]

        def change(i):
            if i % 4 == 3:
                flow.set_budget(next(budgets))
                slots.add(rt.cache.n_slots)

        assert same(decode(flow.model, ids, 60, change), want)
        assert len(slots) == 5 and min(slots) == flow.plan.min_slots


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
def test_prefetching_changes_nothing(tmp_path, device, right):
    "A prefetcher that knows the routing of the next layer-steps, and one that names experts not in use."
    path = write_checkpoint("olmoe", tmp_path, dtype="bfloat16")
    ref = load(path, device, "grouped_mm")
    ids = prompt(ref, device, batch=1)
    length = 200 if device.type != "sim" else 60  # there, test_device.py has the 200
    want = decode(ref, ids, length)
    # the default policy may keep a whole layer, whose layer-steps then begin without the host
    with offloaded(path, "40%", cpu_memory_budget="60%", eviction_policy="lru") as flow:
        rt, steps, at = flow.runtime, [], itertools.count(1)
        begin = rt.cache.begin
        rt.cache.begin = lambda layer, experts: steps.append((layer, list(experts))) or begin(layer, steps[-1][1])
        assert same(decode(flow.model, ids, length), want)
        rt.cache.begin, n = begin, len(rt.cache.num_experts)
        assert len(steps) == length * n and rt.cache.count.prefetched == 0

        def guess(layer, experts):
            for to_come, used in steps[(i := next(at)) : i + 2]:
                yield to_come, used if right else [e for e in range(8) if e not in used][:4]

        rt.prefetcher = guess
        assert same(decode(flow.model, ids, length), want)
        count = rt.cache.count
        assert count.prefetched > 0
        assert count.in_time + count.late > count.wasted if right else count.wasted > count.in_time + count.late, count


@contextmanager
def no_wait(device, monkeypatch):
    "Fails if the host waits for the device, as far as the device can tell; and if it waits for a router's choice, in any case."

    def there(self):
        assert self.event.query(), "the host would wait for the router's choice"
        return self.host.reshape(-1).tolist()

    with monkeypatch.context() as m:
        m.setattr(Fetched, "ids", there)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        elif device.type == "sim":
            from simdev import counters

            before = counters()["syncs"]
            yield
            assert counters()["syncs"] == before
        else:
            yield


def test_no_host_sync_when_all_is_resident(tmp_path, device, monkeypatch):
    "bf16, since the grouped product of other types has the host wait in itself."
    path = write_checkpoint("olmoe", tmp_path, dtype="bfloat16")
    ref = load(path, device, "grouped_mm")
    x = prompt(ref, device, n=1, batch=1)
    with torch.no_grad(), offloaded(path, "100%") as flow:
        want = ref(x).logits
        flow.model(x)
        flow.model(x)
        torch.accelerator.synchronize()
        with no_wait(device, monkeypatch):
            outs = [flow.model(x).logits for _ in range(5)]
        assert all(torch.equal(out, want) for out in outs)
    fails = pytest.raises((AssertionError, RuntimeError))  # so the check can fail
    with torch.no_grad(), offloaded(path, "50%", preload=False) as flow, fails, no_wait(device, monkeypatch):
        flow.model(x)


@pytest.mark.parametrize("mode", ["eager", "grouped_mm"])
def test_no_pageable_copy(tmp_path, device, mode):
    "Every expert comes from pinned memory, also if it has to be read from disk first."
    path = write_checkpoint("olmoe", tmp_path, dtype="bfloat16")
    with offloaded(path, "25%", cpu_memory_budget="30%", experts_implementation=mode) as flow:
        decode(flow.model, prompt(flow.model, device, batch=1), 40)
        moved = flow.runtime.executor.moved
        assert moved.copies_pageable == moved.bytes_pageable == 0
        assert moved.copies_pinned > 0
        assert moved.bytes_pinned >= flow.runtime.traffic.bytes_loaded > 0 and moved.host_misses > 0


def test_another_host_tier_while_it_decodes(tmp_path, device):
    "The bits of a tier that has all; and every copy comes from pinned memory still."
    path = write_checkpoint("olmoe", tmp_path, dtype="bfloat16")
    with offloaded(path, "25%") as flow:
        ids = prompt(flow.model, device, batch=1)
        want = decode(flow.model, ids, 40)
        shares, sizes = itertools.cycle(["20%", "100%", "40%"]), set()

        def between(i):
            flow.set(cpu_memory_budget=next(shares))
            sizes.add(flow.host_slots)

        assert same(decode(flow.model, ids, 40, between), want) and len(sizes) == 3
        moved = flow.runtime.executor.moved
        assert moved.copies_pageable == 0 < moved.copies_pinned and moved.host_misses > flow.plan.total_experts


@pytest.mark.parametrize("budget", ["100%", "50%", "0.001%"])
@pytest.mark.parametrize("attention", [None, EAGER], ids=["default", "eager"])
def test_peak_within_plan(tmp_path, device, budget, attention):
    "What the device's allocator gave out for the model, its cache and its work stays below the plan."
    path = write_checkpoint("olmoe", tmp_path, dtype="bfloat16", **WIDER)
    gc.collect()
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    with offloaded(path, budget, attention, context=256) as flow:
        flow.model.generate(prompt(flow.model, device, n=200, batch=1), max_new_tokens=32, do_sample=False)
        held = flow.plan.dense + flow.plan.slots * flow.plan.slot_bytes
        most = torch.accelerator.max_memory_allocated() - before
        budget = flow.plan.nominal - flow.plan.system
        assert most >= held and most <= budget, (most, budget)
        assert flow.report().peak > 0


def test_budget_given_back_is_free(tmp_path, device):
    "The slots of a smaller budget are in nobody's hands afterwards."
    path = write_checkpoint("olmoe", tmp_path, dtype="bfloat16", **WIDER)
    with offloaded(path, "100%") as flow:
        ids = prompt(flow.model, device, batch=1)
        decode(flow.model, ids, 4)
        before, slots = torch.accelerator.memory_allocated(), flow.runtime.cache.n_slots
        flow.set_budget("25%")
        decode(flow.model, ids, 4)
        torch.accelerator.synchronize()
        gone = slots - -(-flow.runtime.cache.n_slots // 8) * 8  # whole segments
        assert before - torch.accelerator.memory_allocated() >= 0.9 * gone * flow.plan.slot_bytes > 0


@pytest.mark.parametrize("preload", [True, False])
def test_weights_that_follow_the_link(device, tmp_path, preload):
    "A few copies are timed for it while loading, and none later."
    path = write_checkpoint("olmoe", tmp_path / "m", dtype="bfloat16")
    for link in (None, "0.05GB/s"):
        with offloaded(path, "50%", priority_weights="auto", preload=preload, paced_link=link) as flow:
            executor = flow.runtime.executor
            assert executor.carried and not executor.timing
            assert dict(flow.weights) == weights_for(executor.carried / executor.busy)
            assert link is None or flow.weights["recency"] == pytest.approx(0.6)
