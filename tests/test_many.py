"""Many prompts: what is equal bit for bit, what token for token, where KV caches are accounted for, and how it breaks off.

The references are transformers itself with the same experts implementation, and the offloaded model asked one prompt at a time.
"""
import inspect
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from expertflow.bundled import ensure
from expertflow.config import BudgetError, ExpertFlowError, LoadError
from expertflow.flow import ExpertFlow
from expertflow.grouping import in_order
from expertflow.many import UnfinishedError, answer_all, can_merge, merge, read, side_by_side
from expertflow.recorder import cache_of
from expertflow.testing import write_checkpoint

TEXTS = ["Once upon a time there was", "12 + 30 = 42, 15 + 20 =", "def total(xs):\n    return", "The old man went to the sea and",
         "7 + 7 = 14, 9 + 9 =", "import os\nimport sys\n\ndef main():", "She",
         "A small red boat lay in the harbour, and the boy who", "class Box:\n    def __init__(self", "1, 2, 3, 4,"]  # fmt: skip
GREEDY = {"do_sample": False}


def ids_of(vocab, lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=g) for n in lengths]


def alone(model, prompt, new, **kw):
    return model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=new, **GREEDY, **kw)[0]


@pytest.fixture(scope="module")
def tiny():
    return ensure("tiny-moe")


def test_token_for_token_those_of_each_prompt_alone(tiny):
    "float32, greedy; at a quarter of the experts; groups of every size, formed by routes and in the order of arrival."
    with ExpertFlow.from_pretrained(tiny, gpu_memory_budget="25%", dtype="float32", context=512) as flow:
        apart = [flow.generate(t, max_new_tokens=24, **GREEDY) for t in TEXTS]
        for block in (1, 4, 16):
            assert flow.generate_many(TEXTS, block, max_new_tokens=24, **GREEDY) == apart, block
        ids = [flow.tokenizer(t, return_tensors="pt").input_ids[0] for t in TEXTS]
        ordered = dict(answer_all(flow.model, ids, 3, 24, by="arrival", **GREEDY))
        assert [flow.tokenizer.decode(ordered[i][len(p) :], skip_special_tokens=True) for i, p in enumerate(ids)] == apart
        assert not flow.requests.taken


@pytest.mark.slow
def test_token_for_token_on_the_larger_model():
    "smollm2-moe in float32."
    with ExpertFlow.from_pretrained("smollm2-moe", gpu_memory_budget="50%", dtype="float32", context=512) as flow:
        apart = [flow.generate(t, max_new_tokens=16, **GREEDY) for t in TEXTS[:6]]
        assert flow.generate_many(TEXTS[:6], 3, max_new_tokens=16, **GREEDY) == apart


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "deepseek_v3", "qwen3_moe"])
def test_bit_for_bit_those_of_the_resident_model(family, dtype, tmp_path):
    "The same groups on the resident model: equal logits of every group and step. gpt_oss has layers with a sliding window."
    path = write_checkpoint(family, tmp_path / family, dtype=dtype)
    ref = AutoModelForCausalLM.from_pretrained(path, dtype="auto", experts_implementation="grouped_mm").eval()
    for name, p in ref.named_parameters():
        if ".experts." in name:
            p.data = p.data.clone()
    prompts = ids_of(ref.config.vocab_size, (3, 40, 17, 1, 25, 9, 33))
    with ExpertFlow.from_pretrained(path, gpu_memory_budget="25%", context=400, experts_implementation="grouped_mm") as flow:
        flow.runtime.poison = True
        logits = []
        for model in (ref, flow.model):
            seen = []
            hook = model.get_output_embeddings().register_forward_hook(lambda m, a, out, seen=seen: seen.append(out.clone()))
            got = dict(answer_all(model, prompts, 3, 24, **GREEDY))
            hook.remove()
            logits.append((seen, [got[i] for i in range(len(prompts))]))
    (a, x), (b, y) = logits
    assert len(a) == len(b) and all(torch.equal(i, j) for i, j in zip(a, b, strict=True))
    assert all(torch.equal(i, j) for i, j in zip(x, y, strict=True))


def test_reading_has_the_bits_of_the_prompt_alone(tiny):
    "Logits of the first new token, and the whole cache, in bfloat16 and with token blocks."
    for size in (None, 8):
        with ExpertFlow.from_pretrained(tiny, gpu_memory_budget="25%", context=512, token_block_size=size) as flow:
            prompt = flow.tokenizer(TEXTS[3] * 4, return_tensors="pt").input_ids[0]
            kw = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True, **GREEDY}
            want = flow.model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **kw)
            row = read(flow.model, 0, prompt, GREEDY)
            assert row.routes.shape == (8, 32) and 3.9 < row.routes.sum(1).min() <= row.routes.sum(1).max() < 4.1
            for x, y in zip(row.cache.layers, cache_of(want).layers, strict=True):
                assert torch.equal(x.keys, y.keys) and torch.equal(x.values, y.values)
            assert torch.equal(row.tokens, want.sequences[0])


def test_sliding_windows_merge(tmp_path):
    "Prompts shorter and longer than the window: the merged cache's next logits are those of each alone, up to rounding."
    path = write_checkpoint("gpt_oss", tmp_path, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    window = model.config.sliding_window
    prompts = ids_of(model.config.vocab_size, (3, window - 1, window, window + 1, 3 * window))
    rows = [read(model, i, p, GREEDY) for i, p in enumerate(prompts)]
    assert all(can_merge(r.cache) for r in rows)
    ids, mask = side_by_side(rows, 0)
    cache = merge([r.cache for r in rows])
    assert cache.get_seq_length() == max(map(len, prompts))
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        got = model(input_ids=ids[:, -1:], attention_mask=mask, position_ids=mask.cumsum(1)[:, -1:] - 1, **{name: cache}).logits
        want = torch.stack([model(r.tokens[None]).logits[0, -1] for r in rows])
    assert torch.allclose(got[:, -1], want, atol=1e-4), (got[:, -1] - want).abs().amax(1)


def test_families_with_a_running_state_go_one_by_one(tmp_path):
    path = write_checkpoint("qwen3_next", tmp_path, dtype="float32")
    with ExpertFlow.from_pretrained(path, gpu_memory_budget="50%", context=128) as flow:
        prompts = ids_of(flow.model.config.vocab_size, (5, 9, 12))
        assert not can_merge(read(flow.model, 0, prompts[0], GREEDY).cache)
        got = dict(answer_all(flow.model, prompts, 3, 10, **GREEDY))
        for i, p in enumerate(prompts):
            assert torch.equal(got[i], alone(flow.model, p, 10))


def test_texts_that_end_early(tiny):
    "Every text stops at its own end, in whatever company; also one that ends with its first token."
    with ExpertFlow.from_pretrained(tiny, gpu_memory_budget="50%", dtype="float32", context=512) as flow:
        ids = [flow.tokenizer(t, return_tensors="pt").input_ids[0] for t in TEXTS]
        free = [alone(flow.model, p, 24)[len(p) :].tolist() for p in ids]
        eos = [free[0][0], free[1][5]]  # the first at once, the second after six tokens at most
        want = [alone(flow.model, p, 24, eos_token_id=eos, pad_token_id=0) for p in ids]
        got = dict(answer_all(flow.model, ids, 4, 24, eos_token_id=eos, **GREEDY))
        assert len({len(x) for x in want}) > 2
        assert [got[i].tolist() for i in range(len(ids))] == [x.tolist() for x in want]
        least = [alone(flow.model, p, 24, eos_token_id=eos, pad_token_id=0, min_new_tokens=7) for p in ids]
        got = dict(answer_all(flow.model, ids, 4, 24, eos_token_id=eos, min_new_tokens=7, **GREEDY))
        assert [got[i].tolist() for i in range(len(ids))] == [x.tolist() for x in least]


def test_kv_is_admitted_and_pools_follow(tiny):
    "A reserve for few tokens: prompts are read in several parts, never above it. A prompt that has no room alone is refused."
    with ExpertFlow.from_pretrained(tiny, gpu_memory_budget="25%", dtype="float32", context=100) as flow:
        requests, most = flow.requests, []
        admit = requests.admit

        def watched(*args):
            admit(*args)
            most.append(sum(requests.taken.values()))
            assert most[-1] <= flow.ledger.held("device", "KV cache")

        requests.admit = watched
        apart = [flow.generate(t, max_new_tokens=8, **GREEDY) for t in TEXTS]
        before = flow.ledger.held("device", "KV cache")
        reads = len(flow.generations)
        assert flow.generate_many(TEXTS, max_new_tokens=8, **GREEDY) == apart
        assert flow.ledger.held("device", "KV cache") == before, "the reserve has not grown"
        assert not requests.taken and max(most) > 0.5 * before
        prompts = [g.prompt_tokens for g in flow.generations[reads:]]
        assert len(prompts) > len(TEXTS) + 1, "more than one part"
        with pytest.raises(UnfinishedError, match=r"prompt 1 .*BudgetError") as e:
            flow.generate_many([TEXTS[0], TEXTS[3] * 40], block=1, max_new_tokens=8, **GREEDY)
        assert e.value.failed == [1] and e.value.finished == {0: apart[0]} and isinstance(e.value.__cause__, BudgetError)
        assert not requests.taken


def test_a_failure_names_its_prompts_and_keeps_the_others(tiny):
    "Reading experts fails after the first group has been answered."
    with ExpertFlow.from_pretrained(tiny, gpu_memory_budget="25%", dtype="float32", context=512) as flow:
        apart = [flow.generate(t, max_new_tokens=8, **GREEDY) for t in TEXTS]
        rest, wait = iter(range(10**9)), flow.runtime.executor.wait
        done = []

        def failing(slot):
            if done:
                raise LoadError("the disk is gone")
            return wait(slot)

        flow.runtime.executor.wait = failing
        answers = flow.stream_many(TEXTS, 4, max_new_tokens=8, **GREEDY)
        with pytest.raises(UnfinishedError, match="the disk is gone") as e:
            for i, text in answers:
                done.append(i)
                assert text == apart[i]
        assert len(done) == 4 and set(e.value.failed).isdisjoint(done) and len(e.value.failed) == 4
        assert isinstance(e.value.__cause__, LoadError) and not flow.requests.taken and next(rest) == 0
        flow.runtime.executor.wait = wait
        assert flow.generate_many(TEXTS, 4, max_new_tokens=8, **GREEDY) == apart, "works again"


def test_ctrl_c_leaves_nothing_half_done(tiny):
    with ExpertFlow.from_pretrained(tiny, gpu_memory_budget="25%", dtype="float32", context=512) as flow:
        apart = [flow.generate(t, max_new_tokens=8, **GREEDY) for t in TEXTS]
        steps = iter(range(10**9))

        def pressed(module, args, output):
            if next(steps) == 25:  # in the middle of a group
                raise KeyboardInterrupt

        hook = flow.model.get_output_embeddings().register_forward_hook(pressed)
        with pytest.raises(KeyboardInterrupt):
            flow.generate_many(TEXTS, 4, max_new_tokens=8, **GREEDY)
        hook.remove()
        assert not flow.requests.taken and not flow.runtime.cache.pins.any()
        experts = [flow.model.get_submodule(n) for n in flow.runtime.store.layers]
        assert not any(m._forward_pre_hooks for m in experts), "counting has ended"
        assert flow.generate_many(TEXTS, 4, max_new_tokens=8, **GREEDY) == apart


def test_a_reader_that_goes_away_early(tiny):
    with ExpertFlow.from_pretrained(tiny, gpu_memory_budget="25%", dtype="float32", context=512) as flow:
        answers = flow.stream_many(TEXTS, 4, max_new_tokens=8, **GREEDY)
        i, text = next(answers)
        assert flow.requests.taken and flow.generate(TEXTS[i], max_new_tokens=8, **GREEDY) == text, "another request in between"
        answers.close()
        assert not flow.requests.taken


def test_two_streams_read_in_turn(tiny):
    "The first to begin is the first to end: each gives back its own caches, and not the other's."
    with ExpertFlow.from_pretrained(tiny, gpu_memory_budget="25%", dtype="float32", context=512) as flow:
        few, more = (flow.stream_many(TEXTS[:n], 2, max_new_tokens=4, **GREEDY) for n in (2, 6))
        next(few), next(more)
        both = sum(flow.requests.taken.values())
        few.close()
        assert 0 < sum(flow.requests.taken.values()) < both
        assert len(list(more)) == 5 and not flow.requests.taken


def test_counts_only_its_own_thread(tiny):
    "Another thread generates meanwhile: routes and answers are those without it."
    with ExpertFlow.from_pretrained(tiny, gpu_memory_budget="50%", dtype="float32", context=512, batch=4) as flow:
        prompt = flow.tokenizer(TEXTS[1], return_tensors="pt").input_ids[0]
        want, stop = read(flow.model, 0, prompt, GREEDY).routes, threading.Event()

        def other():
            while not stop.is_set():
                alone(flow.model, torch.ones(5, dtype=torch.long), 4)

        thread = threading.Thread(target=other)
        thread.start()
        try:
            assert all((read(flow.model, 0, prompt, GREEDY).routes == want).all() for _ in range(5))
        finally:
            stop.set()
            thread.join()


def test_what_is_refused(tiny):
    with ExpertFlow.from_pretrained(tiny, gpu_memory_budget="50%", context=256) as flow:
        assert flow.generate_many([]) == []
        refused = [("one", {}, "give a list"), (["a", 3], {}, "prompt 1"), (["a"], {"num_beams": 2}, "num_beams=2"),
                   (["a"], {"max_new_tokens": -1}, "at least 1"), (["a"], {"max_new_tokens": 0}, "at least 1"),
                   (["a"], {"max_new_tokens": "3"}, "whole number"), (["a"], {"block": "2"}, "whole number"),
                   (["a"], {"block": 0}, "block=0"),
                   (["a"], {"streamer": object()}, "streamer"), (["a"], {"max_length": 9}, "max_new_tokens=")]  # fmt: skip
        for prompts, kw, what in refused:
            with pytest.raises(ExpertFlowError, match=what):
                flow.generate_many(prompts, **kw)
        assert not flow.requests.taken


def test_groups_are_formed_by_routes(tiny):
    "Sums, code and tales, shuffled: most of a group are of one kind, which the order of arrival would not give."
    with ExpertFlow.from_pretrained(tiny, gpu_memory_budget="50%", dtype="float32", context=512) as flow:
        kinds = [[f"{i} + {i + 3} = {2 * i + 3}, {9 - i} + {i} =" for i in range(4)],
                 [f"def {n}(self, x):\n    if x is None:\n        return" for n in ("add", "drop", "find", "put")],
                 [f"The {n} went down to the old house by the sea, and" for n in ("girl", "man", "child", "king")]]  # fmt: skip
        texts = [kinds[i % 3][i // 3] for i in range(12)]
        together = []
        generate = flow.model.generate

        def watched(**kw):
            if len(kw["input_ids"]) > 1:
                together.append([flow.tokenizer.decode(x, skip_special_tokens=True) for x in kw["input_ids"]])
            return generate(**kw)

        flow.model.generate = watched
        flow.generate_many(texts, 4, max_new_tokens=4, **GREEDY)
        of = lambda text: next(k for k, some in enumerate(kinds) if any(text.startswith(s) for s in some))
        groups = [[of(t) for t in g] for g in together]
        assert len(groups) == 3 and sum(max(map(g.count, g)) for g in groups) == 12, groups
        assert [sorted({i % 3 for i in g}) for g in in_order(12, 4)] == [[0, 1, 2]] * 3
