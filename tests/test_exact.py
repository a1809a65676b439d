"""Strict mode: logits and tokens equal the fully resident model's bit for bit.

The reference is transformers itself with the same experts implementation. Every slot is filled with NaN before an expert is
read into it, and before anything is, so that a stale or half-read expert cannot go unnoticed.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from expertflow.flow import ExpertFlow
from expertflow.testing import FAMILIES, write_checkpoint

BUDGETS = ("100%", "50%", "25%", "minimum")
LENGTHS = (1, 31, 32, 33, 65, 150)
CORE = {  # the whole matrix; for the other families fewer lengths and tokens
    "olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe",
    "granitemoeshared", "glm4_moe", "dots1", "flex_olmo", "minimax", "phimoe", "nemotron_h",
}  # fmt: skip
OUTSIDE_REGISTRY = {"longcat_flash"}  # transformers offers only its own loop


def resident(path, mode):
    "The reference. Its routed experts are cloned: views into the file are not aligned, which changes fp32 bits (slots are)."
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", experts_implementation=mode).eval()
    for name, p in model.named_parameters():
        if ".experts." in name:
            p.data = p.data.clone()
    return model


def offloaded(path, mode, budget, **kw):
    budget = "0.001%" if budget == "minimum" else budget
    flow = ExpertFlow.from_pretrained(path, gpu_memory_budget=budget, context=400, batch=3, experts_implementation=mode, **kw)
    rt = flow.runtime
    rt.poison = True
    for slot in rt.cache.free:
        rt.slab.poison(slot)
    return flow


def prompts(vocab, lengths):
    g = torch.Generator().manual_seed(0)
    for n in lengths:
        for batch in (1, 3):
            ids = torch.randint(3, vocab, (batch, n), generator=g)
            mask = torch.ones_like(ids)
            if batch == 3 and n > 4:
                mask[0, : n // 3] = 0  # left padding
            yield {"input_ids": ids, "attention_mask": mask}


def generate(model, inputs, n):
    out = model.generate(**inputs, do_sample=False, max_new_tokens=n, output_logits=True, return_dict_in_generate=True)
    return out.sequences, torch.stack(out.logits)


def same(a, b):
    "Equal, bit for bit as far as values go: a family's own NaN (masked logits) counts as equal to itself."
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    "Tiny random checkpoints, written once."
    made = {}

    def get(family, dtype):
        if (family, dtype) not in made:
            made[family, dtype] = write_checkpoint(family, tmp_path_factory.mktemp(f"{family}-{dtype}"), dtype=dtype)
        return made[family, dtype]

    return get


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_bits(family, dtype, checkpoint):
    "Prompts of all lengths, batches 1 and 3, four budgets, both references; then new tokens, most at the smallest budget."
    path = checkpoint(family, dtype)
    lengths, new = (LENGTHS, 128) if family in CORE else ((1, 33, 80), 16)
    for mode in ("eager",) if family in OUTSIDE_REGISTRY else ("eager", "grouped_mm"):
        ref = resident(path, mode)
        inputs = list(prompts(ref.config.vocab_size, lengths))
        with torch.no_grad():
            expected = [ref(**x).logits for x in inputs]
        short, long = inputs[3], inputs[2]
        tokens = {n: generate(ref, x, n) for n, x in ((8, short), (new, long))}
        assert not expected[-1].isnan().any()
        for i, budget in enumerate(BUDGETS):
            with offloaded(path, mode, budget, preload=bool(i % 2)) as flow, torch.no_grad():
                for x, want in zip(inputs, expected, strict=True):
                    assert torch.equal(flow.model(**x).logits, want), (mode, budget, x["input_ids"].shape)
                n, x = (new, long) if budget == "minimum" else (8, short)
                got = generate(flow.model, x, n)
                assert torch.equal(got[0], tokens[n][0]) and same(got[1], tokens[n][1]), (mode, budget, n)
                assert flow.runtime.cache.count.misses > 0 or budget == "100%"
