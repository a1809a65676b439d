"The same promises on a real accelerator; skipped where there is none."

import pytest
import torch
from transformers import AutoModelForCausalLM

from expertflow.flow import ExpertFlow
from expertflow.testing import write_checkpoint

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    return torch.accelerator.current_accelerator()


def load(path, device, mode):
    kw = {"dtype": "auto", "experts_implementation": mode, "device_map": {"": device}}
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **kw).eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("budget", ["100%", "50%", "0.001%"])
def test_eager_is_equal(tmp_path, device, family, dtype, budget):
    "The family's own loop over experts: the same kernels on the same shapes, so the same bits."
    path = write_checkpoint(family, tmp_path, dtype=dtype)
    ref = load(path, device, "eager")
    settings = {"gpu_memory_budget": budget, "cpu_memory_budget": "1MB", "context": 256, "experts_implementation": "eager"}
    ids = torch.randint(3, ref.config.vocab_size, (2, 33), device=device)
    with ExpertFlow.from_pretrained(path, model_kwargs={"attn_implementation": "eager"}, **settings) as flow:
        flow.runtime.poison = True
        with torch.no_grad():
            assert torch.equal(flow.model(ids).logits, ref(ids).logits)
        same = {"max_new_tokens": 64, "do_sample": False}
        assert torch.equal(flow.model.generate(ids, **same), ref.generate(ids, **same))


def test_grouped_agrees(tmp_path, device):
    "Other kernels than the resident model's (one product per expert): close, and equal to itself at every budget."
    path = write_checkpoint("olmoe", tmp_path, dtype="float32")
    ref = load(path, device, "grouped_mm")
    ids = torch.randint(3, ref.config.vocab_size, (2, 33), device=device)
    seen = []
    for budget in ("100%", "50%", "0.001%"):
        kw = {"model_kwargs": {"attn_implementation": "eager"}, "context": 256}
        with ExpertFlow.from_pretrained(path, gpu_memory_budget=budget, **kw) as flow, torch.no_grad():
            seen.append(flow.model(ids).logits)
    with torch.no_grad():
        torch.testing.assert_close(seen[0], ref(ids).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_peak_within_budget(tmp_path, device):
    "What the device's allocator saw stays below the plan."
    path = write_checkpoint("olmoe", tmp_path, dtype="bfloat16")
    with ExpertFlow.from_pretrained(path, gpu_memory_budget="50%", context=256) as flow:
        flow.model.generate(torch.randint(3, 300, (1, 200), device=device), max_new_tokens=32)
        report = flow.report()
        assert 0 < report.peak <= report.memory["device"]["capacity"]
