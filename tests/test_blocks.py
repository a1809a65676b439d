"Token blocks: recut traces, the prefetch of the next layer, the size that the plan takes, and equal bits with it."
import collections
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from expertflow.blocks import NextLayer, auto_block, best_block, block_costs, in_blocks
from expertflow.config import BudgetError, Config, ConfigError
from expertflow.evictor import make_evictor
from expertflow.flow import ExpertFlow, Room, plan_for, with_block
from expertflow.foresight import record_steps
from expertflow.ledger import inventory
from expertflow.recorder import record
from expertflow.simulator import simulate
from expertflow.testing import write_checkpoint
from expertflow.trace import Trace, load_trace
from expertflow.yardsticks import from_pairs, layer_steps, min_loads

GREEDY = {"do_sample": False}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_checkpoint("olmoe", tmp_path_factory.mktemp("blocks") / "olmoe", dtype="float32")


def prompt(vocab, n, seed=0):
    return torch.randint(3, vocab, (1, n), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def recorded(tiny, tmp_path_factory):
    "A prompt of 150 tokens at once, and what the runtime asks for with blocks of several sizes."
    folder, asked = tmp_path_factory.mktemp("trace"), {}
    with ExpertFlow.from_pretrained(tiny, gpu_memory_budget="50%", context=256, preload=False) as flow:
        ids = prompt(flow.model.config.vocab_size, 150)
        with record(flow, folder / "t"):
            flow.model(input_ids=ids, use_cache=False)
        for size in (1, 7, 64, 150):
            with record_steps(flow.runtime) as steps:
                flow.model.generate(ids, attention_mask=torch.ones_like(ids), prefill_chunk_size=size, max_new_tokens=1, **GREEDY)
            asked[size] = steps
    return load_trace(folder / "t"), asked


@pytest.mark.parametrize("size", [1, 7, 64, 150])
def test_a_recut_trace_asks_for_what_the_runtime_asks_for(recorded, size):
    trace, asked = recorded
    assert [(layer, sorted(e)) for layer, e in layer_steps(in_blocks(trace, size))] == asked[size]


def test_sequences_are_cut_apart():
    rng = np.random.default_rng(0)
    for _ in range(30):
        lengths = rng.integers(1, 40, rng.integers(1, 6))
        seq = rng.permutation(np.repeat(np.arange(len(lengths)), lengths)).astype(np.int32)  # interleaved, as in a batch
        T, size = len(seq), int(rng.integers(1, 20))
        ids = rng.integers(0, 8, (T, 2, 2)).astype(np.uint8)
        weights, at = np.zeros(ids.shape, np.float16), np.arange(T, dtype=np.int32)
        t = Trace(ids, weights, at, np.zeros(T, np.uint8), np.zeros(T, np.int32), seq, (8, 8))
        cut = in_blocks(t, size)
        assert len(cut) == T and (np.diff(cut.step) >= 0).all()
        for p in cut.passes():
            assert len(set(p.sequence.tolist())) == 1 and len(p) <= size
        assert len(list(cut.passes())) == sum(-(-n // size) for n in lengths)
        assert all((np.diff(s.tokens) > 0).all() for s in cut.sequences()), "the order of each text"


@pytest.mark.parametrize("budget", ["25%", "50%"])
@pytest.mark.parametrize("size", [1, 16, 64, None])
def test_read_once_per_layer_and_block(tiny, budget, size):
    "However few slots: no expert is read twice in one layer-step. And the simulator makes the same loads."
    with ExpertFlow.from_pretrained(tiny, gpu_memory_budget=budget, context=256, token_block_size=size, preload=False) as flow:
        ids, rt, reads = prompt(flow.model.config.vocab_size, 150), flow.runtime, collections.Counter()
        start = rt.executor.start

        def counted(load, urgent=True):
            reads[rt.cache.count.steps, load.layer, load.expert] += 1
            start(load, urgent)

        rt.executor.start = counted
        with record_steps(rt) as steps:
            flow.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, **GREEDY)
        assert len(steps) == len(rt.layouts) * -(-150 // (size or 150)) and max(reads.values()) == 1
        load = from_pairs(steps, rt.cache.num_experts)
        simulated = simulate(load, rt.cache.n_slots, "priority_based", judge=False)
        assert simulated.loads == rt.cache.count.loads == sum(reads.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ahead", [False, True])
def test_equal_bits_with_equal_blocks(ahead, dtype, tmp_path):
    "A resident model that reads the prompt in the same blocks gives the same logits; with the next layer prefetched, too."
    path = write_checkpoint("qwen3_moe", tmp_path / "m", dtype=dtype)
    ref = AutoModelForCausalLM.from_pretrained(path, dtype="auto", experts_implementation="grouped_mm").eval()
    for name, p in ref.named_parameters():
        if ".experts." in name:
            p.data = p.data.clone()
    ids = prompt(ref.config.vocab_size, 200)
    ask = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, **GREEDY}
    ask |= {"output_logits": True, "return_dict_in_generate": True}
    for size in (16, 64, None):
        want = ref.generate(ids, prefill_chunk_size=size, **ask)
        with ExpertFlow.from_pretrained(path, gpu_memory_budget="40%", context=256, token_block_size=size) as flow:
            flow.runtime.poison = True
            if ahead:
                flow.runtime.prefetcher = NextLayer(flow.runtime.cache.num_experts)
            got = flow.model.generate(ids, **ask)
            assert torch.equal(got.sequences, want.sequences)
            assert all(torch.equal(a, b) for a, b in zip(got.logits, want.logits, strict=True))
            assert bool(flow.runtime.cache.count.prefetched) == ahead


def test_the_default_policy_keeps_a_part_of_the_loop():
    "Prompt blocks that use nearly all experts of all layers: LRU hits nothing, the default is near MIN."
    rng = np.random.default_rng(0)
    needed = lambda: np.flatnonzero(rng.random(32) < 0.95).tolist()
    steps = from_pairs([(layer, needed()) for _ in range(20) for layer in range(12)], [32] * 12)
    for share, above in ((0.25, 1.02), (0.5, 1.06), (0.75, 1.15)):
        n = round(share * 12 * 32)
        loads, lru = (simulate(steps, n, p, judge=False).loads for p in ("priority_based", "lru"))
        assert loads <= above * min_loads(steps, n, forced=True).sum() and loads < (1 - 0.69 * share) * lru


def test_the_default_policy_is_its_formula_when_a_pass_fits():
    "A token needs a quarter of the slots: the scores are those of the formula."
    p = make_evictor("priority_based", [[1] * 16] * 4)
    rng = np.random.default_rng(0)
    for now in range(1, 41):
        p.observe(now, (now - 1) % 4 * 16 + rng.permutation(16)[:2])
    ids = np.arange(32)
    want = 0.6 * p.frequency(41, ids) + 0.3 / (1 + (41 - p.last[ids]) / 4) + 0.1
    assert np.allclose(p.score(41, ids), want)
    assert (p.score(41, ids[:5]) == p.loop.score(41, ids[:5])).all(), "of seven slots a pass needs more"


def test_next_layer_leaves_small_steps_to_others():
    asked = []
    ahead = NextLayer([8, 8, 4], before=lambda layer, experts: asked.append(layer) or [(0, [7])])
    assert list(ahead(0, [1, 2])) == [(0, [7])] and asked == [0]
    (after, some), = ahead(0, range(8))
    assert after == 1 and sorted(some) == list(range(8))
    assert [x[0] for x in ahead(2, [0, 1, 2])] == [0], "behind the last layer comes the next block"


class Slots:
    def __init__(self, slots):
        self.slots = slots


@pytest.mark.parametrize(("slots", "want"), [(lambda n: 100, None), (lambda n: 100 - (n or 4096) // 64, 256),
                                             (lambda n: 100 - (n or 4096), 16)])  # fmt: skip
def test_auto_takes_the_largest_block_that_costs_few_slots(slots, want):
    def plan(n):
        if n is None and want is not None:
            raise BudgetError("too little")
        return Slots(slots(n))

    assert auto_block(plan, 4096) == want


def test_auto_is_settled_when_the_model_is_loaded(tiny):
    "A share of the experts has its workspace beside it: whole prompts. Few bytes: blocks."
    with ExpertFlow.from_pretrained(tiny, gpu_memory_budget="50%", context=256, token_block_size="auto") as flow:
        assert flow.config.token_block_size is None and flow.requests.block is None
    with pytest.raises(ConfigError, match="token_block_size='often'"):
        Config(token_block_size="often")
    inv = inventory(tiny)
    cfg = Config.make(None, gpu_memory_budget="2MB", context=4096, token_block_size="auto", system_reserve="0B")
    room = Room(10**9, 0)
    plan = lambda c: plan_for(inv, c, room)
    least = plan(Config.make(cfg, gpu_memory_budget="0.01%", token_block_size=16))
    budget = f"{least.fixed + 20 * least.slot_bytes}B"
    settled, chosen = with_block(Config.make(cfg, gpu_memory_budget=budget), plan)
    assert chosen == plan(settled)
    size = settled.token_block_size
    assert 16 <= size < 4096 and plan(settled).slots >= 0.95 * plan(replace(settled, token_block_size=16)).slots


def test_costs_and_choice(recorded):
    trace, _ = recorded
    costs = block_costs(trace, (1, 16, 150), 0.5, workspace=lambda n: n * 100, expert_bytes=1000)
    assert [c.block for c in costs] == [1, 16, 150] and costs[-1].reads == 1 and costs[0].workspace == 100
    assert costs[0].loads > costs[1].loads > costs[2].loads and best_block(costs).block == 150
    assert all(c.as_dict()["simulated"] for c in costs)
    with pytest.raises(ConfigError, match="no block sizes"):
        best_block([])
