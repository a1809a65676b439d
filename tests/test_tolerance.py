"Experts of little weight left out: by the rule and no more, counted, and never where it is strict."

import random
import sys
import threading

import pytest
import torch
from test_exact import generate, prompts, resident, same

import expertflow.runtime
from expertflow.cache import ABSENT, check
from expertflow.config import ExpertFlowError
from expertflow.flow import ExpertFlow
from expertflow.runtime import leave_out
from expertflow.testing import write_checkpoint, write_tokenizer
from expertflow.tolerance import against, quality_check, read

pytest_plugins = ["simdev.plugin"]
FAMILIES = ["olmoe", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tokenizer(write_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"), dtype="bfloat16"))


def load(path, budget="25%", **kw):
    return ExpertFlow.from_pretrained(path, **({"gpu_memory_budget": budget, "context": 400, "batch": 3} | kw))


def by_hand(index, weights, absent, most, rescale):
    "The rule, in words of Python: the experts left out, and what the router's choice becomes."
    rows = [list(zip(i, w, strict=True)) for i, w in zip(index.tolist(), weights.tolist(), strict=True)]
    best = [max(range(len(r)), key=lambda k: r[k][1]) for r in rows]
    needed = {e for r, b in zip(rows, best, strict=True) for k, (e, w) in enumerate(r)
              if k == b or not w / sum(x for _, x in r) <= most}  # fmt: skip
    gone = {e for r in rows for e, _ in r} - needed
    gone &= set(absent)
    ids = [[r[b][0] if e in gone else e for e, _ in r] for r, b in zip(rows, best, strict=True)]
    kept = [[0 if e in gone else w for e, w in r] for r in rows]
    scaled = [[w * sum(x for _, x in r) / sum(k) for w in k] for r, k in zip(rows, kept, strict=True)]
    return gone, ids, scaled if rescale else kept


@pytest.mark.parametrize("seed", range(20))
def test_the_rule(path, seed):
    "Random choices against the rule written out by hand; what is counted is what happened."
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    with load(path, strict=False, tolerance=0.2, preload=False) as flow:
        rt = flow.runtime
        for _ in range(30):
            n, k, layer, most = rng.choice([1, 1, 2, 5, 40]), rng.randint(1, 4), rng.randrange(3), rng.choice([0.05, 0.2, 1.0])
            index = torch.stack([torch.randperm(8, generator=g)[:k] for _ in range(n)])
            weights = torch.rand(n, k, generator=g) ** rng.choice([1, 4]) + 1e-4
            absent = rng.sample(range(8), rng.randint(0, 8))
            rt.cache.slot_of[layer] = [ABSENT if e in absent else 0 for e in range(8)]
            rt.tolerance, rt.rescale = {layer: most}, rng.random() < 0.5
            before = vars(rt.skipped).copy()
            ids, w = leave_out(rt, layer, index, weights)
            gone, want_ids, want_w = by_hand(index, weights, absent, most, rt.rescale)
            assert ids.tolist() == want_ids and torch.allclose(w, torch.tensor(want_w), atol=1e-6)
            assert not gone & set(ids.flatten().tolist())
            now = {key: x - before[key] for key, x in vars(rt.skipped).items()}
            out = torch.isin(index, torch.tensor(sorted(gone), dtype=index.dtype))
            assert (now["rows"], now["experts"], now["uses"]) == (n, len(gone), int(out.sum()))
            assert now["bytes"] == len(gone) * rt.layouts[layer].nbytes
            assert now["weight"] == pytest.approx(float((weights / weights.sum(-1, keepdim=True))[out].sum()), abs=1e-5)
            if not gone:
                assert ids is index and w is weights
        rt.cache.slot_of = [[ABSENT] * 8 for _ in range(3)]


def test_what_is_never_left_out(path):
    "Weights that are not numbers, an expert on its way, one heavy use among many; and a row keeps its heaviest at any tolerance."
    with load(path, strict=False, tolerance=1.0, preload=False) as flow:
        rt = flow.runtime
        index, nan = torch.tensor([[0, 1, 2]]), float("nan")
        for weights in ([[nan, 0.5, 0.5]], [[0.0, 0.0, 0.0]]):
            assert leave_out(rt, 0, index, torch.tensor(weights))[0] is index
        ids, w = leave_out(rt, 0, index, torch.tensor([[0.2, 0.5, 0.3]]))
        assert ids.tolist() == [[1, 1, 1]] and w.tolist() == [[0, 0.5, 0]]
        many = torch.tensor([[0, 1]] * 9 + [[1, 0]])  # expert 1 is the last row's heaviest
        assert leave_out(rt, 0, many, torch.tensor([[0.99, 0.01]] * 10))[0] is many
        assert rt.prefetch(0, [2]) == 1
        assert leave_out(rt, 0, index, torch.tensor([[0.2, 0.5, 0.3]]))[0].tolist() == [[1, 1, 2]]
        assert leave_out(rt, 0, index[:0], torch.empty(0, 3))[0].shape == (0, 3)
        rt.tolerance = {}  # as another thread sets it, between the look at it and the call
        assert leave_out(rt, 0, index, torch.tensor([[0.2, 0.5, 0.3]]))[0] is index


@pytest.mark.parametrize("mode", ["grouped_mm", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_is_computed_to_the_bit(tmp_path, family, mode, monkeypatch):
    "Every layer-step's output is what the resident experts make of the router's choice without those left out."
    path = write_checkpoint(family, tmp_path, dtype="bfloat16")
    ref = resident(path, mode)
    inner, seen = expertflow.runtime.leave_out, []
    with load(path, "0.001%", experts_implementation=mode, strict=False, tolerance=0.6) as flow:
        flow.runtime.poison = True
        names, forward = flow.runtime.store.layers, {}
        for fn in ("grouped_forward", "eager_forward"):
            forward[fn] = getattr(expertflow.runtime, fn)

            def computes(rt, layer, module, hidden, index, weights, fn=fn):
                out = forward[fn](rt, layer, module, hidden, index, weights)
                want = ref.get_submodule(names[layer])(hidden, index, weights)
                assert same(out, want), (layer, hidden.shape)
                return out

            monkeypatch.setattr(expertflow.runtime, fn, computes)

        def leaves(rt, layer, index, weights):
            new = inner(rt, layer, index, weights)
            seen.append(new[0] is not index)
            return new

        monkeypatch.setattr(expertflow.runtime, "leave_out", leaves)
        for p in prompts(ref.config.get_text_config().vocab_size, (1, 33)):
            generate(flow.model, p, 6)
        check(flow.runtime.cache)
        assert any(seen) and flow.runtime.cache.count.skipped > 0


@pytest.mark.parametrize("mode", ["grouped_mm", "eager"])
def test_a_tolerance_of_nothing_has_the_old_bits(path, mode):
    ref = resident(path, mode)
    with load(path, experts_implementation=mode, strict=False, tolerance=0.0) as flow:
        for p in prompts(ref.config.vocab_size, (1, 33)):
            assert all(same(a, b) for a, b in zip(generate(flow.model, p, 8), generate(ref, p, 8), strict=True))
        assert flow.runtime.skipped.rows > 0 == flow.runtime.cache.count.skipped


def test_strict_does_not_come_near_it(path, monkeypatch):
    "Neither in a strict model, whatever the tolerance, nor in its strict layers."
    layers, inner = [], expertflow.runtime.leave_out
    monkeypatch.setattr(expertflow.runtime, "leave_out", lambda rt, layer, *a: layers.append(layer) or inner(rt, layer, *a))
    with load(path, tolerance=0.9) as flow:
        generate(flow.model, {"input_ids": torch.arange(3, 20)[None]}, 5)
        assert not layers
        flow.set(strict=False, strict_layers=[0, 2])
        needed, begin = {0: 0, 1: 0, 2: 0}, flow.runtime.cache.begin

        def begins(layer, experts):
            needed[layer] += len(experts)
            return begin(layer, experts)

        flow.runtime.cache.begin = begins
        generate(flow.model, {"input_ids": torch.arange(3, 4)[None]}, 30)
        assert set(layers) == {1} and needed[0] == needed[2] == 60 and needed[1] == 60 - flow.runtime.cache.count.skipped < 60


def test_rows_of_several_threads_are_all_counted(path):
    with load(path, "100%", strict=False, tolerance=0.5) as flow:
        rt, index, weights = flow.runtime, torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])
        threads = [threading.Thread(target=lambda: [leave_out(rt, 0, index, weights) for _ in range(3000)]) for _ in range(3)]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        finally:
            sys.setswitchinterval(before)
        assert rt.skipped.rows == 3 * 3000


def test_it_is_told(path):
    "By the generation, by the report and in its text; and nothing is told where nothing was left out."
    with load(path) as flow:
        flow.generate("hello", max_new_tokens=20)
        assert flow.generations[-1].skipped == 0 and "skipped" not in str(flow.report())
        flow.set(strict=False, tolerance=0.5)
        flow.generate("hello", max_new_tokens=20)
        g, s, r = flow.generations[-1], flow.runtime.skipped, flow.report()
        assert g.skipped == s.experts == flow.runtime.cache.count.skipped > 0 and g.bytes_skipped == s.bytes > 0
        assert 0 < g.skipped_share < 0.5 and (g.skipped_share, g.skipped_weight) == pytest.approx((s.weight / s.rows, s.weight))
        assert r.skipped["experts"] == s.experts and r.skipped["share"] == s.share and r.runs[-1]["skipped"] == g.skipped
        assert f"skipped    {g.skipped} missing experts left out" in str(r) and "not the output of the whole model" in str(r)
        assert g.hits + g.misses + g.skipped <= 2 * 3 * (g.prompt_tokens + g.new_tokens)


def test_the_same_on_a_device(sim, tmp_path):
    "The same experts are left out as on the CPU, of the same residents; the checker of missing waits is content."
    from test_device import decode, offloaded, prompt

    path, loose = write_checkpoint("olmoe", tmp_path, dtype="bfloat16"), {"strict": False, "tolerance": 0.5}
    with offloaded(path, "25%", **loose) as flow:
        got = decode(flow.model, prompt(200).to("sim"), 20)
        device = vars(flow.runtime.skipped).copy()
    more = {"device": "cpu", "context": 512, "batch": 3, "model_kwargs": {"attn_implementation": "eager"}}
    with ExpertFlow.from_pretrained(path, gpu_memory_budget="25%", **loose, **more) as flow:
        want = decode(flow.model, prompt(200), 20)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        assert device == pytest.approx(vars(flow.runtime.skipped)) and device["experts"] > 0


# ---- what it costs ----


def test_quality_is_measured():
    "On a trained model: more tolerance, fewer bytes; a lot of it is worse than chance can explain; settings are put back."
    text = "The committee met again on Thursday to discuss the budget for the coming year, and nobody was surprised. "
    with ExpertFlow.from_pretrained("tiny-moe", gpu_memory_budget="0.001%", tolerance=0.03) as flow:
        rows = quality_check(flow, [text * 3, "def mean(xs):\n    return sum(xs) / len(xs)\n" * 4], (0.1, 1.0), tokens=60)
        assert [r["tolerance"] for r in rows] == [0, 0.1, 1]
        assert rows[0]["worse"] == 0 and rows[0]["agree"] == 1 and rows[0]["skipped"] == 0 == rows[0]["skipped_share"]
        assert rows[0]["bytes_per_token"] > rows[1]["bytes_per_token"] > rows[2]["bytes_per_token"]
        assert 0 < rows[1]["skipped_share"] < rows[2]["skipped_share"] and rows[2]["worse"] > 2 * rows[2]["error"] > 0
        assert rows[2]["agree"] < 1 and flow.config.strict and flow.config.tolerance == 0.03
        for bad in ([], [""]):
            with pytest.raises(ExpertFlowError, match="texts"):
                quality_check(flow, bad)
        with pytest.raises(ExpertFlowError, match="tolerance=2"):
            quality_check(flow, [text], (2,), tokens=5)
        assert flow.config.strict and flow.config.tolerance == 0.03


def test_a_reading_is_the_whole_models(path):
    "Strictly, the surprise at each token is what the resident model has in one pass over the text, and memory is given back."
    ref = resident(path, "grouped_mm")
    ids = torch.randint(3, 200, (30,), generator=torch.Generator().manual_seed(1))
    with load(path) as flow:
        r = read(flow, [ids, ids[:7]])
        with torch.no_grad():
            scores = ref(ids[None]).logits[0].float().log_softmax(-1)
        want = -scores[torch.arange(29), ids[1:]]
        assert torch.allclose(r.loss[:29], want, atol=0.05) and torch.equal(r.loss[29:], r.loss[:6])
        assert not flow.requests.taken and against(r, r)["worse"] == 0
