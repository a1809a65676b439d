"""What one does with a transformers model, done with an offloaded one: equal to the resident model, and clean afterwards."""

import gc
import os
import shutil
import threading
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from faulty import open_files
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    FineGrainedFP8Config,
    Mxfp4Config,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)
from transformers.utils import logging

from expertflow.cache import check
from expertflow.checkpoint import Checkpoint
from expertflow.config import POLICIES, ExpertFlowError
from expertflow.flow import ExpertFlow
from expertflow.testing import write_checkpoint

logging.set_verbosity_error()
logging.disable_progress_bar()
TEXT = "The quick brown fox jumps over the lazy dog."


def resident(path, mode="grouped_mm", **kw):
    "The reference; its experts are cloned, because views into the file are not aligned, which changes fp32 bits."
    with Checkpoint.open(path).for_transformers() as folder:
        model = AutoModelForCausalLM.from_pretrained(folder, **{"dtype": "auto", "experts_implementation": mode, **kw}).eval()
    for name, p in model.named_parameters():
        if "experts" in name:
            p.data = p.data.clone()
    return model


def offloaded(path, budget="25%", **kw):
    flow = ExpertFlow.from_pretrained(path, gpu_memory_budget=budget, **{"context": 256, "batch": 4, **kw})
    flow.runtime.poison = True
    return flow


def ids(batch=1, n=12, seed=0, vocab=320):
    return torch.randint(3, vocab, (batch, n), generator=torch.Generator().manual_seed(seed))


def logits(model, x):
    with torch.no_grad():
        return model(x).logits


def readers():
    return [t for t in threading.enumerate() if t.name.startswith("expertflow")]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_checkpoint("olmoe", tmp_path_factory.mktemp("olmoe"), dtype="bfloat16", tokenizer=True)


@pytest.fixture
def own(path, tmp_path):
    "A copy of the checkpoint for one test, which must leave no thread and no open file."
    before = len(readers())
    yield Path(shutil.copytree(path, tmp_path / "own"))
    gc.collect()
    assert len(readers()) == before and not open_files(tmp_path)


@pytest.fixture(scope="module")
def ref(path):
    return resident(path)


@pytest.fixture(scope="module")
def tok(path):
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def flow(path):
    with offloaded(path) as f:
        yield f
        check(f.runtime.cache)
        assert not f.runtime.cache.pins.any()


def both(ref, flow, **kw):
    "`generate` with the same arguments and the same random numbers on both; the results."
    out = []
    for model in (ref, flow.model):
        torch.manual_seed(0)
        out.append(model.generate(**{k: v() if callable(v) else v for k, v in kw.items()}))
    return out


def same(ref, flow, **kw):
    a, b = both(ref, flow, **kw)
    assert torch.equal(a, b)
    return a


# ---- ways to generate ----

MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 50},
    "nucleus": {"do_sample": True, "top_p": 0.8},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beam search": {"do_sample": False, "num_beams": 4},
    "beams, several": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "beam sampling": {"do_sample": True, "num_beams": 3},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 3},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "min_p": {"do_sample": True, "min_p": 0.05},
}


@pytest.mark.parametrize("name", MODES)
def test_generation_modes(name, ref, flow):
    out = same(ref, flow, input_ids=ids(), max_new_tokens=12, **MODES[name])
    assert out.shape[1] == 24


@pytest.mark.parametrize("name", ["greedy", "sampling", "beam search", "static cache"])
def test_left_padded_batch(name, ref, flow):
    x = ids(3, 20)
    mask = torch.ones_like(x)
    mask[0, :7] = 0
    mask[2, :19] = 0
    same(ref, flow, input_ids=x, attention_mask=mask, max_new_tokens=8, **MODES[name])


def test_logits_scores_and_router_logits(ref, flow):
    kw = {"input_ids": ids(2), "max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    a, b = both(ref, flow, output_scores=True, output_hidden_states=True, **kw)
    assert torch.equal(torch.stack(a.logits), torch.stack(b.logits))
    assert torch.equal(torch.stack(a.scores), torch.stack(b.scores))
    assert all(torch.equal(x, y) for s, t in zip(a.hidden_states, b.hidden_states) for x, y in zip(s, t))
    with torch.no_grad():
        a, b = (m(ids(2), output_router_logits=True, labels=ids(2)) for m in (ref, flow.model))
    assert len(a.router_logits) == 3 and torch.equal(a.loss, b.loss)
    assert all(map(torch.equal, a.router_logits, b.router_logits))


def test_cache_of_the_user(ref, flow):
    "A DynamicCache given by the user, continued by a second call."
    out = []
    for model in (ref, flow.model):
        cache = DynamicCache(config=model.config)
        x = model.generate(ids(), past_key_values=cache, max_new_tokens=5, do_sample=False)
        x = torch.cat([x, ids(1, 4, seed=5)], 1)
        out.append(model.generate(x, past_key_values=cache, max_new_tokens=5, do_sample=False))
    assert torch.equal(*out)


@pytest.mark.parametrize("role", ["main", "assistant", "both"])
def test_assisted(role, ref, flow, path, tmp_path):
    "The draft model has other weights, so that some of its tokens are refused."
    small = write_checkpoint("olmoe", tmp_path, dtype="bfloat16", seed=1, num_hidden_layers=1)
    draft = resident(small)
    want = ref.generate(ids(), assistant_model=draft, max_new_tokens=16, do_sample=False)
    assert torch.equal(want, ref.generate(ids(), max_new_tokens=16, do_sample=False))
    with offloaded(small, "30%") as d:
        main = ref if role == "assistant" else flow.model
        helper = draft if role == "main" else d.model
        assert torch.equal(main.generate(ids(), assistant_model=helper, max_new_tokens=16, do_sample=False), want)
        assert bool(d.generations) == (role != "main")


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_prefill_in_blocks(chunk, path, ref):
    "token_block_size: the same as transformers' chunked prefill."
    x = ids(2, 33)
    kw = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    want = ref.generate(x, prefill_chunk_size=chunk, **kw)
    with offloaded(path, token_block_size=chunk) as f:
        steps = f.runtime.cache.count.steps
        got = f.model.generate(x, **kw)
        assert torch.equal(got.sequences, want.sequences) and torch.equal(torch.stack(got.logits), torch.stack(want.logits))
        assert f.runtime.cache.count.steps - steps == 3 * (-(-33 // chunk) + 5)


def test_text_streamers(ref, flow, tok, capsys):
    inputs = tok(TEXT, return_tensors="pt")
    want = tok.decode(ref.generate(**inputs, max_new_tokens=10, do_sample=False)[0, inputs.input_ids.shape[1] :])
    flow.model.generate(**inputs, max_new_tokens=10, do_sample=False, streamer=TextStreamer(tok, skip_prompt=True))
    assert capsys.readouterr().out.strip() == want.strip()
    streamer = TextIteratorStreamer(tok, skip_prompt=True, timeout=60)
    kw = {**inputs, "max_new_tokens": 10, "do_sample": False, "streamer": streamer}
    t = threading.Thread(target=flow.model.generate, kwargs=kw)
    t.start()
    assert "".join(streamer) == want
    t.join()


def test_chat_template_and_facade(ref, flow, tok):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    enc = tok.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = ref.generate(**enc, max_new_tokens=10, do_sample=False)[0, enc["input_ids"].shape[1] :]
    want = tok.decode(out, skip_special_tokens=True)
    assert flow.generate(chat, max_new_tokens=10, do_sample=False) == want
    pieces = list(flow.stream(chat, max_new_tokens=10, do_sample=False))
    assert "".join(pieces) == want
    assert flow.generate(chat[1:], max_new_tokens=4, do_sample=False) == flow.generate(TEXT, max_new_tokens=4, do_sample=False)
    n = len(flow.generations)
    flow.generate(TEXT, max_new_tokens=4, do_sample=False)
    assert len(flow.generations) == n + 1 and flow.generations[-1].new_tokens == 4
    assert str(flow.report()) and flow.report().as_dict()["runs"]


def test_pipeline(ref, flow, tok):
    kw = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    texts = [TEXT, "Only a few of the experts"]
    want, got = (pipeline("text-generation", model=m, tokenizer=tok)(texts, batch_size=2, **kw) for m in (ref, flow.model))
    assert got == want and len(got) == 2


def test_plain_forward_variants(ref, flow):
    x = ids(2, 9)
    emb = ref.get_input_embeddings()(x)
    with torch.no_grad():
        assert torch.equal(ref(inputs_embeds=emb).logits, flow.model(inputs_embeds=emb).logits)
        a, b = (m(x, use_cache=True, output_attentions=False, output_hidden_states=True) for m in (ref, flow.model))
        assert all(map(torch.equal, a.hidden_states, b.hidden_states))
        a, b = (m(x[:, :1], past_key_values=c.past_key_values).logits for m, c in ((ref, a), (flow.model, b)))
        assert torch.equal(a, b)
    with torch.inference_mode():
        assert torch.equal(ref(x).logits, flow.model(x).logits)
    assert torch.equal(logits(ref, x), logits(flow.model, x))


@pytest.mark.parametrize("mode", ["grouped_mm", "eager"])
def test_gradient_mode(mode, path):
    "Without no_grad the forward works; going back through the experts is refused in one line."
    x = ids(1, 9)
    want = logits(resident(path, mode), x)
    with offloaded(path, experts_implementation=mode) as f:
        out = f.model(x)
        assert torch.equal(out.logits, want)
        with pytest.raises(ExpertFlowError, match="no gradient") as e:
            out.logits.float().sum().backward()
        assert "\n" not in str(e.value)
        f.model.requires_grad_(False)
        assert not f.model(x).logits.requires_grad
        assert torch.equal(logits(f.model, x), want)
        f.model.train()
        f.model.eval()


# ---- forms of a checkpoint ----

FORMS = {
    "single file": {"shard_bytes": None},
    "single file, fused": {"shard_bytes": None, "fused": True},
    "sharded": {},
    "sharded, fused": {"fused": True},
    "no index": {"index": False},
    "no index, fused": {"index": False, "fused": True},
    "fp16": {"dtype": "float16"},
    "fp32": {"dtype": "float32"},
    "tied": {"tie_word_embeddings": True},
    "one layer": {"num_hidden_layers": 1},
}


def compare(want, flow, n=40, new=8):
    x = ids(2, n)
    assert torch.equal(logits(flow.model, x), logits(want, x))
    assert torch.equal(logits(flow.model, x[:1, :1]), logits(want, x[:1, :1]))
    same(want, flow, input_ids=x, max_new_tokens=new, do_sample=False)
    check(flow.runtime.cache)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_forms(family, form, tmp_path):
    if family == "gpt_oss" and form == "one layer":
        pytest.skip("its list of layer types has one length")
    p = write_checkpoint(family, tmp_path, **{"dtype": "bfloat16", **FORMS[form]})
    want = resident(p)
    assert len(list(tmp_path.glob("*.index.json"))) == (0 if form.startswith(("no index", "single")) else 1)
    with offloaded(p) as f:
        compare(want, f)
        assert f.model.dtype == want.dtype
        if form == "tied":
            assert f.model.lm_head.weight is f.model.get_input_embeddings().weight
    assert not open_files(tmp_path)


@pytest.mark.parametrize("stored,dtype", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float16")])
def test_other_dtype(stored, dtype, tmp_path):
    p = write_checkpoint("qwen3_moe", tmp_path, dtype=stored)
    with offloaded(p, dtype=dtype) as f:
        assert f.model.dtype == getattr(torch, dtype) and not f.runtime.store.is_fast(0)
        compare(resident(p, dtype=getattr(torch, dtype)), f)


@pytest.mark.skipif(transformers.__version__.startswith("5.16."), reason="transformers 5.16 cannot load FP8 itself: no reference")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral", "minimax_m2"])
@pytest.mark.parametrize("mode", ["grouped_mm", "eager"])
def test_fp8_blocks(family, mode, tmp_path):
    "Unpacked as they are read; the reference is transformers' own dequantised model."
    p = write_checkpoint(family, tmp_path, dtype="bfloat16", fp8=True)
    want = resident(p, mode, quantization_config=FineGrainedFP8Config(dequantize=True))
    with offloaded(p, experts_implementation=mode) as f:
        compare(want, f)


@pytest.mark.parametrize("mode", ["grouped_mm", "eager"])
@pytest.mark.parametrize("shards", [None, 20_000])
def test_mxfp4(mode, shards, tmp_path):
    p = write_checkpoint("gpt_oss", tmp_path, dtype="bfloat16", mxfp4=True, shard_bytes=shards)
    want = resident(p, mode, quantization_config=Mxfp4Config(dequantize=True))
    with offloaded(p, experts_implementation=mode) as f:
        compare(want, f)


# ---- waves ----


class Count:
    "Wraps `store.read_into` and counts."

    def __init__(self, flow):
        self.reads, self.read = [], flow.runtime.store.read_into
        flow.runtime.store.read_into = self

    def __call__(self, layer, expert, buf):
        self.reads.append((layer, expert))
        return self.read(layer, expert, buf)


@pytest.mark.parametrize("budget", ["0.001%", "25%", "50%", "99%"])
def test_each_expert_is_read_once_per_layer_step(budget, path, ref):
    "A prompt that needs all experts of all layers, with fewer slots: every missing expert is read exactly once per layer."
    x = ids(2, 60)
    with offloaded(path, budget, preload=False) as f:
        assert f.runtime.cache.n_slots == {"0.001%": 2, "25%": 6, "50%": 12, "99%": 24}[budget]
        count = Count(f)
        for _ in range(3):
            count.reads.clear()
            before = f.runtime.cache.count.misses
            assert torch.equal(logits(f.model, x), logits(ref, x))
            f.runtime.reap()
            assert len(set(count.reads)) == len(count.reads) == f.runtime.cache.count.misses - before
        assert f.runtime.cache.count.stolen == 0
        assert f.runtime.traffic.bytes_loaded == f.runtime.cache.count.loads * f.runtime.layouts[0].nbytes
        if budget == "0.001%":
            assert len(count.reads) >= 22  # nearly all 24: at most two stay from layer to layer


def test_eager_in_waves(path):
    "The family's own loop asks in ascending order: a resident expert that is needed later may have to go, and come again."
    want = resident(path, "eager")
    x = ids(2, 60)
    with offloaded(path, "0.001%", experts_implementation="eager") as f:
        count = Count(f)
        loads = f.runtime.cache.count.loads
        for _ in range(3):
            assert torch.equal(logits(f.model, x), logits(want, x))
        assert len(count.reads) == f.runtime.cache.count.loads - loads
        check(f.runtime.cache)


@pytest.mark.parametrize(("policy", "threads"), [*((p, 4) for p in POLICIES), ("lru", 1), ("priority_based", 1)])
def test_policies_and_threads(policy, threads, path, ref):
    with offloaded(path, "30%", eviction_policy=policy, io_threads=threads, eviction_threshold=0.5, warmup_steps=3) as f:
        compare(ref, f, new=20)
        assert len(readers()) >= threads
        assert f.runtime.cache.count.evictions > 0


@pytest.mark.parametrize("mode", ["grouped_mm", "eager"])
def test_two_threads_generate_with_one_model(mode, path):
    want = resident(path, mode)
    prompts = [ids(1 + i % 2, 5 + 9 * i, seed=i) for i in range(4)]
    kw = {"max_new_tokens": 12, "do_sample": False}
    expected = [want.generate(x, **kw) for x in prompts]
    got = {}
    with offloaded(path, experts_implementation=mode) as f:

        def work(i):
            got[i] = f.model.generate(prompts[i], **kw)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        check(f.runtime.cache)
    assert sorted(got) == [0, 1, 2, 3] and all(torch.equal(got[i], expected[i]) for i in got)


def test_two_models_at_once(path, ref, tmp_path):
    "In one process, in two threads: nothing that they change is global."
    other = write_checkpoint("mixtral", tmp_path, dtype="bfloat16")
    want = {0: ref.generate(ids(), max_new_tokens=30, do_sample=False)}
    want[1] = resident(other).generate(ids(), max_new_tokens=30, do_sample=False)
    got = {}
    with offloaded(path) as a, offloaded(other) as b:

        def work(i):
            got[i] = (a, b)[i].model.generate(ids(), max_new_tokens=30, do_sample=False)

        threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


# ---- the end ----


def test_close(own):
    before = len(readers())
    with offloaded(own) as f:
        assert len(open_files(own)) > 5 and len(readers()) == before + 2
        f.model.generate(ids(), max_new_tokens=2)
    assert len(readers()) == before and not open_files(own)
    f.close()
    for use in (lambda: f.model(ids()), lambda: f.model.generate(ids(), max_new_tokens=2), lambda: f.generate(TEXT)):
        with pytest.raises(ExpertFlowError, match="closed") as e:
            use()
        assert "\n" not in str(e.value)
    assert f.report()


def test_close_while_another_thread_generates(own):
    f = offloaded(own, "0.001%")
    raised, started = [], threading.Event()
    streamer = TextIteratorStreamer(f.tokenizer, timeout=60)

    def work():
        started.set()
        try:
            f.model.generate(ids(), max_new_tokens=200, do_sample=False, streamer=streamer)
        except BaseException as e:
            raised.append(e)

    t = threading.Thread(target=work)
    t.start()
    next(streamer)
    f.close()
    t.join(20)
    assert not t.is_alive() and isinstance(raised[0], ExpertFlowError) and "closed" in str(raised[0])
    assert not open_files(own)


def test_forgotten_without_close(own):
    "Threads and files go when nobody can use them any more; the model alone keeps them."
    before = len(readers())
    f = offloaded(own)
    slab = weakref.ref(f.runtime.slab)
    model = f.model
    del f
    gc.collect()
    want = model.generate(ids(), max_new_tokens=3, do_sample=False)
    assert want.shape[1] == 15
    del model
    gc.collect()
    assert len(readers()) == before and not open_files(own) and slab() is None


def test_forgotten_where_a_reader_thread_collects_garbage(own):
    "It is closed by one of the threads that closing waits for."
    before = len(readers())
    f = offloaded(own)
    f.runtime.executor.readers.submit(f.runtime.close).result(20)
    end = time.monotonic() + 20
    while len(readers()) > before:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not open_files(own)


def test_many_times_leaves_nothing(own):
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with offloaded(own) as f:
            f.model(ids())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= fds


def test_no_warnings(own):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with offloaded(own) as f:
            f.model.generate(ids(), attention_mask=torch.ones_like(ids()), max_new_tokens=2, do_sample=False)
            f.generate(TEXT, max_new_tokens=2)
