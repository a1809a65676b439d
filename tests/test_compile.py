"Graphs and shapes: torch.compile without a break, and a whole forward on a CUDA device that is not there (FakeTensorMode)."

import warnings

import pytest
import simdev
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from expertflow.cache import ExpertCache
from expertflow.config import ExpertFlowError
from expertflow.evictor import LRU
from expertflow.flow import ExpertFlow
from expertflow.mover import Slab
from expertflow.runtime import Runtime, attach, strip
from expertflow.testing import write_checkpoint

pytest_plugins = ["simdev.plugin"]
IDS = torch.arange(3, 23)[None]


@pytest.fixture(scope="module", params=["olmoe", "qwen3_moe", "deepseek_v3"])
def path(request, tmp_path_factory):
    return write_checkpoint(request.param, tmp_path_factory.mktemp(request.param), dtype="bfloat16")


@pytest.mark.parametrize("budget", ["100%", "50%"])
def test_compiled_without_a_break(path, budget):
    "One graph, and the bits of the uncompiled model (the backend changes no kernels)."
    with ExpertFlow.from_pretrained(path, gpu_memory_budget=budget, context=64) as flow, torch.no_grad():
        compiled = torch.compile(lambda x: flow.model(x, use_cache=False).logits, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(IDS), flow.model(IDS, use_cache=False).logits)
        assert flow.runtime.cache.count.misses > 0 or budget == "100%"


def test_the_operator_is_kept_out_of_cuda_graphs():
    assert torch.Tag.cudagraph_unsafe in torch.ops.expertflow.experts.default.tags


def test_no_gradient_through_the_operator(path):
    with ExpertFlow.from_pretrained(path, gpu_memory_budget="50%", context=64) as flow:
        experts = next(m for m in flow.model.modules() if hasattr(m, "_expertflow_number"))
        x = torch.ones(2, flow.model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        args = torch.tensor([[0, 1], [1, 2]]), torch.ones(2, 2).bfloat16(), experts._expertflow_number
        out = torch.ops.expertflow.experts(x, *args)
        with pytest.raises(ExpertFlowError, match="no gradient"):
            out.sum().backward()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_generate_with_either_cache(path, kind):
    ref = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    kw = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "cache_implementation": kind}
    with warnings.catch_warnings(), ExpertFlow.from_pretrained(path, gpu_memory_budget="50%", context=64) as flow:
        warnings.simplefilter("ignore")
        assert torch.equal(flow.model.generate(IDS, **kw), ref.generate(IDS, **kw, disable_compile=True))


class NothingMoves:
    "An executor for a device that has no memory."

    def begin(self): pass

    def used(self, slots): pass

    def landed(self, slot): return True


def on_fake_cuda(path, store):
    "The model with all experts resident on a CUDA device, without a CUDA device."
    config = AutoConfig.from_pretrained(path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    for module in model.modules():  # .to() does not know how to move what is not there
        module._parameters = {k: None if p is None else torch.nn.Parameter(p.to("cuda")) for k, p in module._parameters.items()}
        module._buffers = {k: b.to("cuda") for k, b in module._buffers.items()}
    model.set_experts_implementation("expertflow")
    strip(model, store)
    cache = ExpertCache(store.num_experts, sum(store.num_experts), LRU(len(store.num_experts) * max(store.num_experts)))
    slab = Slab(cache.n_slots, store.slot_bytes, torch.device("cuda"), segment=max(store.num_experts))
    rt = Runtime(store, cache, slab, NothingMoves())
    rt.note_uses = False
    for layer, n in enumerate(store.num_experts):
        for e in range(n):
            cache.take(layer, e, cache.free.pop())
        rt._tables[layer] = list(cache.slot_of[layer]), torch.arange(n, device="cuda")
    attach(model, rt)
    return model, rt


def inputs(n):
    "The mask comes along: transformers 5.16 would make it with `torch.tensor`, which wants a real device."
    return {"input_ids": torch.zeros(2, n, dtype=torch.long, device="cuda"),
            "attention_mask": torch.zeros(2, 1, n, n, dtype=torch.bfloat16, device="cuda")}


def test_forward_on_a_fake_cuda_device(sim, path, monkeypatch):
    "Devices and dtypes of the resident path are right all the way; a table left on the host is found."
    simdev.pretend_cuda()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))  # transformers asks before it takes grouped_mm
    with ExpertFlow.from_pretrained(path, gpu_memory_budget="50%", context=64, device="cpu") as flow:
        store = flow.runtime.store
        with FakeTensorMode(), torch.no_grad():
            model, rt = on_fake_cuda(path, store)
            for n in (1, 20):
                logits = model(**inputs(n), use_cache=False).logits
                assert logits.device.type == "cuda" and logits.shape[:2] == (2, n) and logits.dtype == torch.bfloat16
            rt._tables[0] = rt._tables[0][0], torch.arange(store.num_experts[0])
            with pytest.raises(RuntimeError, match=r"cpu|device"):
                model(**inputs(5), use_cache=False)
