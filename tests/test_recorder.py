"""Recording changes no bit of the output, and the trace says what the experts modules were really given."""

import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from expertflow.config import ExpertFlowError, TraceError, UnsupportedModelError
from expertflow.flow import ExpertFlow
from expertflow.recorder import experts_names, record
from expertflow.testing import FAMILIES, write_checkpoint
from expertflow.trace import from_bf16, load_trace, verify

NEW = 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def get(family="qwen3_moe", dtype="float32"):
        if (family, dtype) not in made:
            made[family, dtype] = write_checkpoint(family, tmp_path_factory.mktemp(family), dtype=dtype)
        return made[family, dtype]

    return get


@pytest.fixture
def model(checkpoint):
    return resident(checkpoint())


def resident(path):
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()


def batch(vocab=320, lengths=(9, 4, 12)):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocab, (len(lengths), max(lengths)), generator=g)
    mask = torch.stack([(torch.arange(max(lengths)) >= max(lengths) - n).long() for n in lengths])
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, inputs, n=NEW, **kw):
    kw = {"do_sample": False, "max_new_tokens": n, "output_logits": True, "return_dict_in_generate": True} | kw
    out = model.generate(**inputs, **kw)
    return out.sequences, torch.stack(out.logits)


class Spy:
    "What each experts module is called with, by another way than hooks."

    def __init__(self, model):
        self.calls, self.old = {}, []
        for layer, name in enumerate(experts_names(model)):
            m = model.get_submodule(name)
            self.old.append((m, m.__dict__.get("forward")))
            m.forward = self.around(layer, m.forward)

    def around(self, layer, forward):
        def call(*args, **kwargs):
            x, ids, w = [*args, *kwargs.values()]
            self.calls.setdefault(layer, []).append((x.clone(), ids.clone(), w.clone()))
            return forward(*args, **kwargs)

        return call

    def stop(self):
        for m, old in self.old:
            m.__dict__.pop("forward")
            if old is not None:
                m.forward = old


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, checkpoint, tmp_path):
    "Bits of the output; ids, weights and states; sequences without their left padding."
    model, inputs = resident(checkpoint(family)), batch()
    before = generate(model, inputs)
    spy = Spy(model)
    with record(model, tmp_path / "t", hidden=True):
        after = generate(model, inputs)
    spy.stop()
    assert torch.equal(before[0], after[0]) and torch.equal(before[1].nan_to_num(), after[1].nan_to_num())
    assert torch.equal(generate(model, inputs)[0], before[0]) and not model._forward_hooks and not model._forward_pre_hooks
    verify(tmp_path / "t")
    t = load_trace(tmp_path / "t")
    assert [len(s) for s in t.sequences()] == [n + NEW - 1 for n in (9, 4, 12)]
    keep = torch.cat([inputs["attention_mask"].flatten().bool(), torch.ones(3 * (NEW - 1)).bool()])
    for layer, calls in spy.calls.items():
        x, ids, w = (torch.cat([c[i].flatten(0, -2) for c in calls])[keep] for i in range(3))
        ids = torch.where(ids < t.num_experts[layer], ids, t.pad)
        k = ids.shape[1]
        assert (t.ids[:, layer, :k] == ids.numpy()).all() and (t.ids[:, layer, k:] == t.pad).all()
        assert (t.weights[:, layer, :k] == torch.where(ids == t.pad, 0, w).half().numpy()).all()
        assert (from_bf16(t.hidden[:, layer]) == x.bfloat16().float().numpy()).all()
    for s, row, n in zip(t.sequences(), after[0], (9, 4, 12), strict=True):
        assert s.tokens.tolist() == row[12 - n : -1].tolist() and s.decode.tolist() == [False] * n + [True] * (NEW - 1)
    assert [len(p) for p in t.passes()] == [25] + [3] * (NEW - 1)


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "deepseek_v3", "flex_olmo", "nemotron_h", "longcat_flash"])
def test_offloaded(family, checkpoint, tmp_path):
    "The same trace as of the resident model, while experts come and go."
    path, inputs = checkpoint(family), batch()
    model = resident(path)
    if family == "longcat_flash":
        model.set_experts_implementation("eager")
    with record(model, tmp_path / "resident"):
        want = generate(model, inputs)
    with ExpertFlow.from_pretrained(path, gpu_memory_budget="25%", context=64, batch=3) as flow:
        plain = generate(flow.model, inputs)
        with record(flow, tmp_path / "offloaded"):
            got = generate(flow.model, inputs)
    assert torch.equal(plain[0], got[0]) and torch.equal(plain[1], got[1]) and torch.equal(want[0], got[0])
    a, b = load_trace(tmp_path / "resident"), load_trace(tmp_path / "offloaded")
    for name in ("ids", "weights", "tokens", "flags", "step", "sequence"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert a.about == b.about and a.about["fingerprint"] and min(a.about["expert_bytes"]) > 0


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "flex_olmo", "cohere2_moe", "gemma4_text", "jamba"])
def test_residual(family, checkpoint, tmp_path):
    "The stream before the norm: the tap makes the recorded choice of it."
    from expertflow.taps import find_taps

    model = resident(checkpoint(family, "bfloat16"))
    with record(model, tmp_path / "t", hidden="residual"), torch.no_grad():
        model(input_ids=torch.arange(3, 40)[None])
    t = load_trace(tmp_path / "t")
    for tap in find_taps(model):
        if tap.problem is None:
            stream = torch.from_numpy(from_bf16(t.hidden[:, tap.layer])).bfloat16()
            with torch.no_grad():
                ids = tap.route(stream).ids
            assert (np.sort(ids.numpy(), 1) == np.sort(t.ids[:, tap.layer], 1)).all()


def test_a_long_prompt_in_pieces(model, tmp_path):
    "The last piece is a single token, and part of the prompt nevertheless."
    with record(model, tmp_path / "t"):
        generate(model, batch(lengths=(17,)), prefill_chunk_size=8)
    t = load_trace(tmp_path / "t")
    assert [len(p) for p in t.passes()] == [8, 8, 1] + [1] * (NEW - 1)
    assert t.decode.tolist() == [False] * 17 + [True] * (NEW - 1) and len(list(t.sequences())) == 1


def test_a_conversation(model, tmp_path):
    "A second turn with the cache of the first goes on with its text; without, it begins a new one."
    ids = batch(lengths=(9,))["input_ids"]
    with record(model, tmp_path / "t") as rec:
        rec.label = "chat"
        cache = DynamicCache(config=model.config)
        out = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
        model.generate(torch.cat([out, ids], 1), past_key_values=cache, max_new_tokens=2, do_sample=False)
        rec.label = {"file": "other"}
        model.generate(ids, max_new_tokens=2, do_sample=False)
    t = load_trace(tmp_path / "t")
    assert [len(s) for s in t.sequences()] == [9 + 2 + 1 + 9 + 1, 9 + 1] and t.labels == ["chat", {"file": "other"}]
    assert np.flatnonzero(t.flags & 2).tolist() == [0, 22]


def test_by_hand(model, tmp_path):
    "A loop around the forward: the cache that the model makes itself is recognised; without cache every pass is a text."
    ids = batch(lengths=(6,))["input_ids"]
    with record(model, tmp_path / "t"), torch.no_grad():
        out = model(ids, use_cache=True)
        model(input_ids=ids[:, :1], past_key_values=out.past_key_values)
        model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=False)
    t = load_trace(tmp_path / "t")
    assert [len(s) for s in t.sequences()] == [7, 6] and t.tokens[7:].tolist() == [-1] * 6


def test_static_cache(model, tmp_path):
    inputs = batch()
    with record(model, tmp_path / "t"):
        generate(model, inputs, cache_implementation="static")
    with record(model, tmp_path / "u"):
        generate(model, inputs)
    a, b = load_trace(tmp_path / "t"), load_trace(tmp_path / "u")
    assert np.array_equal(a.ids, b.ids) and np.array_equal(a.sequence, b.sequence) and len(a) == 25 + 3 * (NEW - 1)
    cache = StaticCache(config=model.config, max_cache_len=32)
    with record(model, tmp_path / "v"):
        for _ in range(2):  # the same cache for another text
            generate(model, batch(lengths=(5,)), past_key_values=cache)
            cache.reset()
    assert [len(s) for s in load_trace(tmp_path / "v").sequences()] == [5 + NEW - 1] * 2


@pytest.mark.parametrize("pad", [0, 7])
def test_texts_that_have_ended(pad, model, tmp_path):
    "Rows that have had their end are filled up with padding, which is no part of their text."
    free = generate(model, batch(), n=8)[0][:, 12:]
    eos = int(free[1, 3])
    assert eos not in free[0].tolist() or free[0].tolist().index(eos) != 3
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = eos, pad or eos
    with record(model, tmp_path / "t"):
        out = generate(model, batch(), n=8)[0][:, 12:]
    t = load_trace(tmp_path / "t")
    for s, row, n in zip(t.sequences(), out.tolist(), (9, 4, 12), strict=True):
        end = row.index(eos) + 1 if eos in row else len(row)
        assert s.tokens[n:].tolist() == row[: min(end, len(row) - 1)]


def test_beams_are_refused(model, tmp_path):
    with pytest.raises(ExpertFlowError, match="num_beams=1"), record(model, tmp_path / "t"):
        model.generate(**batch(), num_beams=2, max_new_tokens=4)
    model.generate(**batch(), num_beams=2, max_new_tokens=4)  # afterwards it works again
    verify(tmp_path / "t")


def test_several_samples_of_one_prompt(model, tmp_path):
    with record(model, tmp_path / "t"):
        model.generate(**batch(lengths=(5,)), num_return_sequences=3, do_sample=True, max_new_tokens=3, min_new_tokens=3)
    assert [len(s) for s in load_trace(tmp_path / "t").sequences()] == [7] * 3


def test_a_pass_that_breaks_off_is_not_recorded(model, tmp_path):
    m = model.get_submodule(experts_names(model)[-1])
    with record(model, tmp_path / "t"), torch.no_grad():
        model(torch.tensor([[5, 6, 7]]))
        h = m.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.tensor([[8, 9]]))
        h.remove()
        model(torch.tensor([[10]]))
    assert load_trace(tmp_path / "t").tokens.tolist() == [5, 6, 7, 10]


def test_threads(model, tmp_path):
    "Each thread's passes stay its own."
    with record(model, tmp_path / "t"):
        work = [threading.Thread(target=generate, args=(model, batch(lengths=(n,)))) for n in (5, 6, 7, 8)]
        for w in work: w.start()
        for w in work: w.join()
    t = load_trace(tmp_path / "t")
    assert sorted(len(s) for s in t.sequences()) == [n + NEW - 1 for n in (5, 6, 7, 8)]
    for s in t.sequences():
        want = batch(lengths=(len(s) - NEW + 1,))["input_ids"][0].tolist()
        assert s.tokens[: len(want)].tolist() == want


def test_what_is_refused(model, tmp_path):
    with pytest.warns(UserWarning, match="nothing ran"): record(model, tmp_path / "t").close()
    t = load_trace(tmp_path / "t")
    assert len(t) == 0 and not list(t.sequences()) and not list(t.passes())
    with pytest.raises(ExpertFlowError, match="holds a trace already"): record(model, tmp_path / "t")
    with pytest.raises(ExpertFlowError, match="hidden='all'"): record(model, tmp_path / "u", hidden="all")
    with pytest.raises(UnsupportedModelError, match="no experts"): record(torch.nn.Linear(1, 1), tmp_path / "u")
    with record(model, tmp_path / "v"), torch.no_grad():
        with pytest.raises(ExpertFlowError, match="a part of the recorded model"): model.model(torch.tensor([[5]]))
        with pytest.raises(ExpertFlowError, match="without input_ids"): model()
    assert not (tmp_path / "u").exists()


def test_compiled_models(model, tmp_path):
    "A compiled model is refused. One that is compiled while it is recorded runs uncompiled, and all of it is in the trace."
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ExpertFlowError, match="compiled"): record(compiled, tmp_path / "t")
    with record(model, tmp_path / "t"), torch.no_grad():
        compiled(torch.tensor([[5, 6]]))
        model(torch.tensor([[5, 6]]))
    a, b = load_trace(tmp_path / "t").sequences()
    assert a.tokens.tolist() == [5, 6] and np.array_equal(a.ids, b.ids)


def test_a_full_disk_is_reported(model, tmp_path):
    "What was written before can be had."
    class Full:
        def write(self, _): raise OSError(28, "No space left on device")
        def close(self): pass

    with record(model, tmp_path / "t") as rec, torch.no_grad():
        model(torch.tensor([[5, 6]]))
        rec.writer.files["weights"].close()
        rec.writer.files["weights"] = Full()
        with pytest.raises(TraceError, match="No space left on device"): model(torch.tensor([[7]]))
    with pytest.raises(TraceError, match="2 complete tokens"): load_trace(tmp_path / "t")
    assert load_trace(tmp_path / "t", partial=True).tokens.tolist() == [5, 6]
