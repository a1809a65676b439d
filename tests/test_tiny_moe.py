"The small trained mixture in the package: whole, as good as recorded, equal bits under a budget, with routing worth the name."
import json
import math

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from expertflow.bundled import ensure
from expertflow.cli import main
from expertflow.flow import ExpertFlow

# Held out in training. Jane Austen, Emma; GSM8K (MIT); Du Fu, from 300 Tang poems.
TEXTS = {
    "novels": (
        "My friend Robert could not resist. They called for him in their way; were all extremely amused; and my brother "
        "asked him to dine with them the next day -- which he did -- and in the course of that visit (as I understand) "
        "he found an opportunity of speaking to Harriet; and certainly did not speak in vain. -- She made him, by her "
        "acceptance, as happy even as he is deserving. He came down by yesterday's coach, and was with me this morning "
        "immediately after breakfast, to report his proceedings, first on my affairs, and then on his own. This is all "
        "that I can relate of the how, where, and when. Your friend Harriet will make a much longer history when you "
        "see her."
    ),
    "maths": """Question: Lee mows one lawn and charges $33. Last week he mowed 16 lawns and \
three customers each gave him a $10 tip. How many dollars did Lee earn mowing lawns last week?
33 * 16 = $528
3 * 10 = $30
528 + 30 = $558
Lee earned $558 mowing lawns last week.
Answer: 558""",
    "tang": """《梦李白・其一》
作者：杜甫
死别已吞声，生别常恻恻。
江南瘴疠地，逐客无消息。
故人入我梦，明我常相忆。
君今在罗网，何以有羽翼？
恐非平生魂，路远不可测。
魂来枫林青，魂返关塞黑。
落月满屋梁，犹疑照颜色。
水深波浪阔，无使蛟龙得。""",
}
RECORDED = {"novels": 53.8, "maths": 16.2, "tang": 54.5}       # perplexity when it was made, float32


@pytest.fixture(scope="module")
def folder(): return ensure("tiny-moe")


@pytest.fixture(scope="module")
def tok(folder): return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder): return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def ids(tok, text): return tok(text, return_tensors="pt").input_ids


@torch.no_grad()
def routed(model, x):
    "Chosen experts [L, T, k], and the share of them that the stream one layer earlier names (gate look-ahead)."
    chosen, entering, hooks = [], [], []
    for layer in model.model.layers:
        hooks += [layer.post_attention_layernorm.register_forward_pre_hook(lambda mod, a: entering.append(a[0][0])),
                  layer.mlp.gate.register_forward_hook(lambda mod, a, out: chosen.append(out[2]))]
    model(input_ids=x, use_cache=False)
    for h in hooks: h.remove()
    layers = model.model.layers
    guess = [F.linear(b.post_attention_layernorm(e), b.mlp.gate.weight).topk(4).indices for b, e in zip(layers[1:], entering)]
    ahead = [(g[:, :, None] == c[:, None]).any(1).float().mean().item() for g, c in zip(guess, chosen[1:])]
    return torch.stack(chosen), sum(ahead) / len(ahead)


def test_is_small_and_needs_nothing(folder):
    assert folder.parent.name == "models" and folder.parent.parent.name == "expertflow"
    files = {p.name: p.stat().st_size for p in folder.iterdir()}
    assert sum(files.values()) < 20_000_000
    assert set(files) == {"README.md", "config.json", "expertflow.json", "generation_config.json", "model.safetensors",
                          "tokenizer.json", "tokenizer_config.json"}
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card and all(word in card for word in ("public domain", "MIT", "PSF", "CC0"))


def test_loads_as_an_ordinary_model(model, tok):
    c = model.config
    assert (type(model).__name__, c.num_hidden_layers, c.num_experts, c.num_experts_per_tok) == ("Qwen3MoeForCausalLM", 8, 32, 4)
    assert len(tok) == c.vocab_size and sum(p.numel() for p in model.parameters()) == 7_244_416
    for text in TEXTS.values(): assert tok.decode(tok(text).input_ids) == text


def test_perplexity_is_what_was_recorded(model, tok):
    for kind, text in TEXTS.items():
        x = ids(tok, text)
        with torch.no_grad(): loss = F.cross_entropy(model(input_ids=x[:, :-1]).logits[0], x[0, 1:]).item()
        assert math.exp(loss) == pytest.approx(RECORDED[kind], rel=.03), kind


def test_heat_is_of_this_shape(folder):
    heat = json.loads((folder / "expertflow.json").read_text())["heat"]
    assert [len(row) for row in heat] == [32] * 8 and min(map(min, heat)) > 0


def test_routing_is_learned_and_not_collapsed(model, tok):
    got = {k: routed(model, ids(tok, t)) for k, t in TEXTS.items()}
    share = {k: F.one_hot(c, 32).sum(2).float().mean(1) / 4 for k, (c, _) in got.items()}      # [L, 32]
    together = sum(share.values()) / len(share)
    effective = torch.exp(-(together * together.clamp_min(1e-9).log()).sum(1))
    assert effective.min() > 12, effective
    assert min(ahead for _, ahead in got.values()) > .6             # random weights of this shape: 0.55
    apart = torch.minimum(share["novels"], share["tang"]).sum(1).mean()
    assert apart < .6, "the kinds of text use the same experts"


@pytest.mark.parametrize("mode", ["grouped_mm", "eager"])
def test_equal_bits_in_a_quarter_of_the_slots(folder, tok, mode):
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", experts_implementation=mode).eval()
    for name, p in whole.named_parameters():
        if "experts" in name: p.data = p.data.clone()               # views into the file are not aligned as slots are
    with ExpertFlow.from_pretrained("tiny-moe", gpu_memory_budget="25%", context=512, experts_implementation=mode) as flow:
        assert flow.runtime.cache.n_slots == 64
        flow.runtime.poison = True
        for slot in flow.runtime.cache.free: flow.runtime.slab.poison(slot)
        for text in TEXTS.values():
            x = ids(tok, text)[:, :150]
            with torch.no_grad(): assert torch.equal(whole(input_ids=x).logits, flow.model(input_ids=x).logits)
            ask = dict(do_sample=False, max_new_tokens=12, output_logits=True, return_dict_in_generate=True)
            new = [m.generate(input_ids=x[:, :40], **ask) for m in (whole, flow.model)]
            assert torch.equal(new[0].sequences, new[1].sequences)
            assert all(torch.equal(a, b) for a, b in zip(new[0].logits, new[1].logits, strict=True))
        assert flow.runtime.cache.count.misses > 100


def test_command_line_finds_it(capsys):
    assert main(["generate", "Once", "--model", "tiny-moe", "--gpu-memory=25%", "--max-new-tokens=8", "--json", "--report"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["text"].strip() and got["report"]["config"]["model_path"] == "tiny-moe"
    assert main(["plan", "tiny-moe"]) == 0 and "256 experts in 8 layers" in capsys.readouterr().out
