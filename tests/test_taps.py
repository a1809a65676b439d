"Routers, their norms and the residual stream, found in every family; looking changes nothing and leaves nothing."
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from expertflow.bundled import cache_dir
from expertflow.config import UnsupportedModelError
from expertflow.flow import ExpertFlow, find_checkpoint
from expertflow.taps import Watch, decoder_of, find_taps, read_routing, without_experts
from expertflow.testing import FAMILIES, write_checkpoint

IDS = torch.arange(5, 53).reshape(2, 24)
AS_IT_IS = {"flex_olmo", "gemma4_text"}  # no norm between the stream and the router


def hooks(model) -> int: return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def own_forwards(model) -> dict: return {n: m.__dict__["forward"] for n, m in model.named_modules() if "forward" in m.__dict__}


@torch.no_grad()
def collect(model, taps, **kwargs):
    got = {}
    with Watch(taps, lambda layer, r, out: got.__setitem__(layer, (r.clone(), out))):
        logits = model(IDS, **kwargs).logits
    return got, logits


def assert_exact(model, taps):
    got, logits = collect(model, taps)
    assert sorted(got) == [t.layer for t in taps]
    for t in taps:
        stream, output = got[t.layer]
        assert stream.shape == (IDS.numel(), model.config.hidden_size)
        true = read_routing(output)
        with torch.no_grad():
            again = t.route(stream)
            other = t.route(torch.randn_like(stream))
        for a, b in zip(again, true, strict=True): assert torch.equal(a, b), t
        assert not torch.equal(other.logits, true.logits)       # it does look at the stream
        assert true.ids.shape == (IDS.numel(), t.top_k) and true.logits.shape[1] >= t.num_experts
    return got, logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_true_stream_gives_true_bits(family, folder):
    path = write_checkpoint(family, folder / family, shard_bytes=None)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad(): plain = model(IDS).logits
    before = hooks(model), own_forwards(model)
    taps = find_taps(model)
    assert (hooks(model), own_forwards(model)) == before
    assert not any(t.problem for t in taps)
    assert all((t.norm is None) == (family in AS_IT_IS) for t in taps)
    _, logits = assert_exact(model, taps)
    assert torch.equal(logits, plain)
    assert hooks(model) == before[0]


@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "longcat_flash"])
def test_in_half_precision(family, dtype, folder):
    path = write_checkpoint(family, folder / f"{family}-{dtype}", dtype=dtype, shard_bytes=None)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert_exact(model, find_taps(model))


OFFLOADED = ["olmoe", "deepseek_v3", "gpt_oss", "granitemoe", "nemotron_h", "longcat_flash", "gemma4_text"]


@pytest.mark.parametrize("family", OFFLOADED)
def test_offloaded_model_has_the_same_taps(family, folder):
    path = write_checkpoint(family, folder / f"{family}-off")
    resident = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    ours = find_taps(resident)
    with ExpertFlow.from_pretrained(path, gpu_memory_budget="30%", device="cpu") as flow:
        before, moved = own_forwards(flow.model), flow.runtime.traffic.bytes_loaded
        taps = find_taps(flow.model)
        assert flow.runtime.traffic.bytes_loaded == moved
        assert own_forwards(flow.model) == before
        key = lambda t: (t.layer, t.experts, t.router_name, t.norm_name, t.num_experts, t.top_k)
        assert list(map(key, taps)) == list(map(key, ours))
        assert [t.experts for t in taps] == flow.runtime.store.layers
        with torch.no_grad(): plain = flow.model(IDS).logits
        _, logits = assert_exact(flow.model, taps)
        assert torch.equal(logits, plain)


SHARED_FIRST = {"qwen2_moe", "qwen3_next", "qwen3_5_moe_text", "hunyuan_v1_moe", "ernie4_5_moe", "minimax_m3_vl_text", "laguna"}
SHARED_AFTER = {"granitemoeshared", "granitemoehybrid", "exaone_moe", "hy_v3", "aria_text", "deepseek_v2", "deepseek_v3",
                "glm4_moe", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "dots1", "solar_open", "nemotron_h"}


@pytest.mark.parametrize("family", sorted(SHARED_FIRST | SHARED_AFTER | {"olmoe", "mixtral", "afmoe"}))
def test_shared_expert_is_known_before_the_routed_ones(family, folder):
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(family, folder / f"{family}-s", shard_bytes=None))
    taps = find_taps(model)
    assert {t.shared is not None and t.shared.first for t in taps} == {family in SHARED_FIRST}
    assert {t.shared is not None for t in taps} == {family in SHARED_FIRST | SHARED_AFTER}   # afmoe has a norm after the sum
    inside, outside, calls, after = {}, {}, [], {}
    count = [t.shared.module.register_forward_hook(lambda *a: calls.append(1)) for t in taps if t.shared]
    count += [model.get_submodule(decoder_of(model, t.experts)).register_forward_hook(
        lambda m, a, out, i=t.layer: after.__setitem__(i, out[0] if isinstance(out, tuple) else out)) for t in taps]

    def see(layer, r, out):
        inside[layer], outside[layer] = taps[layer].known(r), taps[layer].known(r.clone())
        assert taps[layer].sequences(r) == 2 and taps[layer].sequences(r.clone()) == 1
        if taps[layer].shared is None: assert inside[layer] is r

    with Watch(taps, see), without_experts(model, [t.experts for t in taps]), torch.no_grad(): model(IDS)
    for h in count: h.remove()
    assert len(calls) == sum(t.shared is not None for t in taps)        # the model's own call, no more
    for t in taps:
        torch.testing.assert_close(inside[t.layer], outside[t.layer])
        if t.shared: torch.testing.assert_close(after[t.layer].flatten(0, -2), inside[t.layer], rtol=1e-4, atol=1e-4)
    assert hooks(model) == 0 and not any(t.now.__dict__ for t in taps)


def test_shared_experts_in_half_precision():
    if not list((cache_dir() / "models").glob("smollm2-moe-*")): pytest.skip("smollm2-moe has not been assembled here")
    model = AutoModelForCausalLM.from_pretrained(find_checkpoint("smollm2-moe"), dtype="auto")
    taps = find_taps(model)
    assert len(taps) == 29
    assert all(t.shared and t.shared.gate is not None and t.shared.scale == 1 and t.shared.first for t in taps)


def test_generating_hands_over_every_step(folder):
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint("qwen3_moe", folder / "gen"))
    taps, seen = find_taps(model), []
    args = dict(max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(IDS))
    plain = model.generate(IDS, **args)
    with Watch(taps, lambda layer, r, out: seen.append((layer, len(r)))): watched = model.generate(IDS, **args)
    assert torch.equal(plain, watched)
    assert seen == [(i, n) for n in (48, 2, 2, 2, 2) for i in range(len(taps))]
    with Watch(taps, lambda layer, r, out: seen.append(1)) as w:
        w.remove()
        seen.clear()
        model.generate(IDS, **args)
    assert not seen and hooks(model) == 0


def test_an_error_leaves_no_hooks(folder, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint("mixtral", folder / "err"))
    taps = find_taps(model)

    def bad(layer, r, out): raise RuntimeError("callback")

    with pytest.raises(RuntimeError, match="callback"), Watch(taps, bad): model(IDS)
    assert hooks(model) == 0
    monkeypatch.setattr(taps[-1].router, "register_forward_hook", bad)
    with pytest.raises(TypeError): Watch(taps, print)
    assert hooks(model) == 0
    monkeypatch.undo()
    monkeypatch.setattr(type(model), "forward", lambda self, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError): find_taps(model)
    assert hooks(model) == 0 and not own_forwards(model)


def test_two_threads_do_not_mix_their_streams(folder):
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint("qwen3_moe", folder / "threads"))
    taps = find_taps(model)
    wrong, counts = [], {}

    def check(layer, r, out):
        t = threading.get_ident()
        counts[t] = counts.get(t, 0) + 1
        if not torch.equal(taps[layer].route(r).logits, read_routing(out).logits): wrong.append(layer)

    def run(n):
        with torch.no_grad():
            for i in range(20): model(torch.full((1, n), 7 + i))

    with Watch(taps, check):
        threads = [threading.Thread(target=run, args=(n,)) for n in (5, 9)]
        for t in threads: t.start()
        for _ in range(5): find_taps(model)     # runs without experts, but in this thread only
        for t in threads: t.join()
    assert not wrong and sorted(n for t, n in counts.items() if t != threading.get_ident()) == [60, 60]


def test_tracing_in_one_thread_leaves_the_results_of_another_alone(folder):
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint("olmoe", folder / "olmoe"))
    results = []

    def run():
        with torch.no_grad():
            for _ in range(50): results.append(model(IDS).logits)

    t = threading.Thread(target=run)
    t.start()
    for _ in range(10): find_taps(model)
    t.join()
    assert all(torch.equal(r, results[0]) for r in results)
    with torch.no_grad(): assert torch.equal(model(IDS).logits, results[0])


def test_what_cannot_be_told_ahead_says_so(folder):
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint("olmoe", folder / "told"))
    gate = model.model.layers[1].mlp.gate
    forward = type(gate).forward

    class Stateful(type(gate)):
        def forward(self, hidden, state): return forward(self, hidden)

    gate.__class__ = Stateful
    gate.register_forward_pre_hook(lambda m, args: (args[0], args[0].sum()))        # as a family with a recurrent router does it
    taps = find_taps(model)
    assert [bool(t.problem) for t in taps] == [False, True, False]
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.mlp\.gate: it also looks at something"):
        taps[1].route(torch.zeros(1, 64))


def test_a_dense_model_is_refused():
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
    model = LlamaForCausalLM(config)
    with pytest.raises(UnsupportedModelError, match="no experts modules"): find_taps(model)


@pytest.mark.parametrize("output", [torch.zeros(3, 8), (torch.zeros(3, 8),), None, (torch.zeros(3, dtype=torch.long),)])
def test_another_kind_of_router_output(output):
    with pytest.raises(ValueError, match="a router that returns"): read_routing(output)
