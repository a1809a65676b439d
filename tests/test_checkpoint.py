"""Damaged, incomplete, contradictory and changing checkpoints: every one is refused in one clear line."""

import errno
import json
import os
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from expertflow import checkpoint
from expertflow.checkpoint import (
    Checkpoint,
    ExpertStore,
    Run,
    SlotLayout,
    check_supported,
    find_experts,
    match,
    merge,
    read_header,
    read_run,
    unpacking,
)
from expertflow.config import CheckpointError, LoadError, UnsupportedModelError
from expertflow.testing import (
    FAMILIES,
    family_config,
    write_checkpoint,
    write_random_olmoe,
    write_shards,
    write_tokenizer,
)

logging.set_verbosity_error()
logging.disable_progress_bar()


def build(path, config=None, dtype=torch.float32):
    """A store without loading the model: the empty model and what `from_pretrained` would hand over."""
    config = config or AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    mapping = get_model_conversion_mapping(model)
    return ExpertStore(model, Checkpoint.open(path), LoadStateDictConfig(dtype=dtype, weight_mapping=mapping))


def refused(error, words, f, *args):
    """`f` fails with `error`, in one line that has all `words`."""
    with pytest.raises(error) as e:
        f(*args)
    text = str(e.value)
    assert "\n" not in text and len(text) < 500, text
    for w in words:
        assert str(w) in text, (w, text)
    return text


@pytest.fixture
def path(tmp_path):
    return write_checkpoint("olmoe", tmp_path / "olmoe")


@pytest.fixture
def one_file(tmp_path):
    return write_checkpoint("olmoe", tmp_path / "one", shard_bytes=None)


def slot(store):
    return memoryview(bytearray(store.slot_bytes))


def rewrite(path, change):
    """Apply `change` to the tensors (name -> tensor) of a one-file checkpoint."""
    file = path / "model.safetensors"
    tensors = {k: t.clone() for k, t in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


# -- headers ----------------------------------------------------------------------------------------------------------


def raw(file, header, data=b"", n=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text) if n is None else n) + text + data)
    return file


def entry(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD_HEADERS = {
    "empty file": (b"", None),
    "seven bytes": (b"1234567", None),
    "length beyond the file": (struct.pack("<Q", 1 << 40) + b"{}", None),
    "largest length": (b"\xff" * 8 + b"{}", None),
    "zero length": (struct.pack("<Q", 0), None),
    "not JSON": (b"{nope}", b""),
    "not UTF-8": (b"\xff\xfe{}", b""),
    "a list": ([], b""),
    "a number": (b"42", b""),
    "deep nesting": (b"[" * 100_000, b""),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, b"0000"),
    "unknown dtype": ({"a": entry(0, 4, [1], "F31")}, b"0000"),
    "entry is a list": ({"a": [0, 4]}, b"0000"),
    "negative shape": ({"a": entry(0, 4, [-1, -1])}, b"0000"),
    "shape of text": ({"a": entry(0, 4, ["x"])}, b"0000"),
    "offsets of text": ({"a": entry("0", "4", [1])}, b"0000"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, b"0000"),
    "end before begin": ({"a": entry(4, 0, [1])}, b"0000"),
    "too small for its shape": ({"a": entry(0, 4, [2])}, b"0000"),
    "overlap": ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"0" * 12),
    "hole": ({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, b"0" * 12),
    "starts late": ({"a": entry(4, 8, [1])}, b"0" * 8),
    "data missing": ({"a": entry(0, 8, [2])}, b"0" * 7),
    "data too long": ({"a": entry(0, 8, [2])}, b"0" * 9),
    "the same name twice": (b'{"a":%s,"a":%s}' % ((b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}',) * 2), b"0"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_HEADERS)
def test_bad_header(what, tmp_path):
    header, data = BAD_HEADERS[what]
    file = tmp_path / "model.safetensors"
    if data is None:
        file.write_bytes(header)
    else:
        raw(file, header, data)
    refused(CheckpointError, [file, "download it again"], read_header, file)


def test_truncation_names_both_sizes(path):
    file = sorted(path.glob("*.safetensors"))[2]
    size = file.stat().st_size
    os.truncate(file, size - 5)
    refused(CheckpointError, [file, "truncated", f"{size - 5:,}", f"{size:,}", "download it again"], Checkpoint.open, path)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, 600])
def test_truncation_anywhere(keep, path):
    file = sorted(path.glob("*.safetensors"))[2]
    os.truncate(file, keep)
    refused(CheckpointError, [file], Checkpoint.open, path)


def test_good_headers(tmp_path):
    refs, _ = read_header(raw(tmp_path / "empty.safetensors", {"__metadata__": {"a": "b"}}))
    assert refs == {}
    header = {"s": entry(0, 4, []), "none": entry(4, 4, [0, 7]), "half": entry(4, 6, [4], "F4")}
    refs, stamp = read_header(raw(tmp_path / "odd.safetensors", header, b"123456"))
    assert [refs[k].nbytes for k in header] == [4, 0, 2] and refs["s"].shape == () and stamp.size > 6


def test_lfs_pointer(path):
    file = sorted(path.glob("*.safetensors"))[0]
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 12\n")
    refused(CheckpointError, [file, "Git LFS", "git lfs pull"], Checkpoint.open, path)


def test_unreadable_file(path):
    file = sorted(path.glob("*.safetensors"))[0]
    file.unlink()
    file.mkdir()
    refused(CheckpointError, [file], Checkpoint.open, path)


# -- directories ------------------------------------------------------------------------------------------------------


def test_no_model(tmp_path):
    refused(CheckpointError, ["no such directory", tmp_path / "x"], Checkpoint.open, tmp_path / "x")
    refused(CheckpointError, [f"no config.json in {tmp_path}"], Checkpoint.open, tmp_path)
    (tmp_path / "config.json").write_text("{")
    refused(CheckpointError, ["config.json"], Checkpoint.open, tmp_path)
    (tmp_path / "config.json").write_text("[]")
    refused(CheckpointError, ["config.json", "JSON object"], Checkpoint.open, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    refused(CheckpointError, ["no .safetensors file", tmp_path], Checkpoint.open, tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model-q4.gguf"])
def test_other_formats(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"x")
    refused(CheckpointError, [name, "safetensors"], Checkpoint.open, tmp_path)


def test_missing_shard(path):
    victim = sorted(path.glob("*.safetensors"))[3]
    victim.unlink()
    refused(CheckpointError, [victim.name, "index"], Checkpoint.open, path)
    (path / "model.safetensors.index.json").unlink()
    refused(CheckpointError, [victim.name, "missing"], Checkpoint.open, path)


def test_last_shard_missing_without_index(path):
    (path / "model.safetensors.index.json").unlink()
    victim = sorted(path.glob("*.safetensors"))[-1]
    victim.unlink()
    refused(CheckpointError, [victim.name], Checkpoint.open, path)


def test_shards_of_two_downloads_mixed(path):
    (path / "model.safetensors.index.json").unlink()
    (path / "model-00001-of-00099.safetensors").write_bytes(sorted(path.glob("*.safetensors"))[0].read_bytes())
    refused(CheckpointError, [path, "shards"], Checkpoint.open, path)


def test_index_names_a_tensor_that_is_not_there(path):
    index = path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    name = next(iter(data["weight_map"]))
    data["weight_map"]["model.extra"] = data["weight_map"][name]
    index.write_text(json.dumps(data))
    refused(CheckpointError, ["model.extra", data["weight_map"][name]], Checkpoint.open, path)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "nope", ""])
def test_bad_index(text, path):
    (path / "model.safetensors.index.json").write_text(text)
    refused(CheckpointError, ["index.json"], Checkpoint.open, path)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", 7, None])
def test_index_must_name_files_of_its_directory(name, path):
    index = path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"][next(iter(data["weight_map"]))] = name
    index.write_text(json.dumps(data))
    refused(CheckpointError, ["index.json"], Checkpoint.open, path)


def test_the_same_tensor_in_two_files(path):
    (path / "model.safetensors.index.json").unlink()
    a, b = sorted(path.glob("*.safetensors"))[:2]
    b.write_bytes(a.read_bytes())
    refused(CheckpointError, [a.name, b.name], Checkpoint.open, path)


def test_what_a_directory_may_also_hold(path):
    want = Checkpoint.open(path).tensors
    (path / "model.safetensors.index.json").unlink()
    for extra in ("consolidated.safetensors", "adapter_model.safetensors", "notes.txt"):
        (path / extra).write_bytes(b"not read at all")
    assert Checkpoint.open(path).tensors == want


def test_a_file_stands_for_its_directory(path, one_file):
    assert Checkpoint.open(one_file / "model.safetensors").path == one_file
    assert Checkpoint.open(sorted(path.glob("model-*"))[0]).path == path


def test_fingerprint(tmp_path, path):
    one = Checkpoint.open(path).fingerprint()
    copy = tmp_path / "copy"
    copy.mkdir()
    for f in path.iterdir():
        (copy / f.name).write_bytes(f.read_bytes())
    assert Checkpoint.open(copy).fingerprint() == one and len(one) == 16
    assert Checkpoint.open(write_checkpoint("olmoe", tmp_path / "b", seed=1)).fingerprint() != one


def test_index_alone_needs_no_torch(path):
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "from expertflow.checkpoint import Checkpoint, check_supported\n"
        f"c = Checkpoint.open({str(path)!r}); check_supported(c.config); print(c.nbytes, c.fingerprint())"
    )
    root = Path(checkpoint.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == str(Checkpoint.open(path).nbytes)


# -- experts and config -----------------------------------------------------------------------------------------------

LAYER1 = "model.layers.1.mlp.experts."


@pytest.mark.parametrize("which", ["3.up_proj", "7.down_proj", "0.gate_proj"])
def test_missing_expert_tensor(which, one_file):
    rewrite(one_file, lambda t: t.pop(f"{LAYER1}{which}.weight"))
    refused(CheckpointError, ["missing", f"{LAYER1}{which}.weight"], build, one_file)


@pytest.mark.parametrize("proj", ["up_proj", "down_proj"])
def test_missing_projection(proj, one_file):
    rewrite(one_file, lambda t: [t.pop(f"{LAYER1}{e}.{proj}.weight") for e in range(8)])
    refused(CheckpointError, ["missing", proj, "model.layers.1"], build, one_file)


def test_missing_layer(one_file):
    rewrite(one_file, lambda t: [t.pop(k) for k in list(t) if k.startswith(LAYER1)])
    refused(CheckpointError, ["missing", "model.layers.1.mlp.experts.down_proj"], build, one_file)


def test_extra_expert(one_file):
    def add(t):
        for k in ("gate", "up", "down"):
            t[f"{LAYER1}8.{k}_proj.weight"] = t[f"{LAYER1}7.{k}_proj.weight"].clone()

    rewrite(one_file, add)
    refused(CheckpointError, ["more experts than the 8", f"{LAYER1}8."], build, one_file)


def test_extra_expert_in_place_of_a_missing_one(one_file):
    rewrite(one_file, lambda t: t.update({f"{LAYER1}9.up_proj.weight": t.pop(f"{LAYER1}2.up_proj.weight")}))
    refused(CheckpointError, [f"{LAYER1}9.up_proj.weight"], build, one_file)


@pytest.mark.parametrize("n", [7, 9])
def test_other_number_of_experts_fused(n, tmp_path):
    path = write_checkpoint("olmoe", tmp_path, fused=True)
    refused(CheckpointError, ["[8, 64, 64]", f"{n} experts"], build, path, family_config("olmoe", num_experts=n))


@pytest.mark.parametrize("fused", [True, False])
def test_other_expert_size(fused, tmp_path):
    path = write_checkpoint("olmoe", tmp_path, fused=fused)
    config = family_config("olmoe", intermediate_size=48)
    refused(CheckpointError, ["shape", "proj", "do not belong together"], build, path, config)


def test_one_expert_of_other_shape(one_file):
    rewrite(one_file, lambda t: t.update({f"{LAYER1}5.up_proj.weight": torch.zeros(16, 64)}))
    refused(CheckpointError, ["shape", "up_proj"], build, one_file)


def test_experts_in_two_forms(one_file):
    rewrite(one_file, lambda t: t.update({f"{LAYER1}down_proj": torch.zeros(8, 64, 32)}))
    refused(CheckpointError, ["twice", "model.layers.1.mlp.experts.down_proj"], build, one_file)


def test_eight_bit_without_scales(tmp_path):
    path = write_checkpoint("olmoe", tmp_path, fused=True, shard_bytes=None)
    rewrite(path, lambda t: t.update({f"{LAYER1}down_proj": t[f"{LAYER1}down_proj"].to(torch.float8_e4m3fn)}))
    refused(UnsupportedModelError, [f"{LAYER1}down_proj", "F8_E4M3"], build, path)


def test_layers_beyond_the_config_are_ignored(one_file):
    """E.g. the multi-token-prediction layer of DeepSeek-V3."""

    def add(t):
        t |= {k.replace("layers.1.", "layers.3."): v.clone() for k, v in list(t.items()) if "layers.1." in k}

    rewrite(one_file, add)
    store = build(one_file)
    assert len(store.layers) == 3 and not any("layers.3." in k for k in store.expert_keys)


@pytest.mark.parametrize("family", ["llama4", "llama4_text", "dbrx", "jetmoe", "switch_transformers", "nllb-moe", "doge"])
def test_unsupported_family(family):
    refused(UnsupportedModelError, [family, "transformers directly"], check_supported, {"model_type": family})


def test_unsupported_family_inside():
    config = {"model_type": "any_vl", "text_config": {"model_type": "llama4_text"}}
    refused(UnsupportedModelError, ["llama4_text"], check_supported, config)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "quanto", "hqq", "no such thing"])
def test_unsupported_quantisation(method):
    config = {"model_type": "mixtral", "quantization_config": {"quant_method": method}}
    refused(UnsupportedModelError, [method, "FP8", "MXFP4"], check_supported, config)


def test_supported(tmp_path):
    for family in FAMILIES:
        check_supported(family_config(family))
        check_supported(family_config(family).to_dict())
    for kind in ("fp8", "mxfp4"):
        check_supported({"model_type": "mixtral", "quantization_config": {"quant_method": kind}})


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma3_text"])
def test_dense(family):
    words = [family, "no routed experts", "transformers directly"]
    refused(UnsupportedModelError, words, check_supported, AutoConfig.for_model(family))


def test_dense_model_in_the_store(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
    config = AutoConfig.for_model("llama", **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    refused(UnsupportedModelError, ["llama", "no routed experts"], build, tmp_path)


# -- while in use -----------------------------------------------------------------------------------------------------


def expert_file(store, layer=1, expert=3):
    return store._plans[layer].files(expert)[0]


def test_file_truncated_between_reads(path):
    store = build(path)
    store.read_into(1, 3, slot(store))
    file = expert_file(store)
    os.truncate(file, file.stat().st_size // 2)
    refused(CheckpointError, [file, "changed while in use", "bytes before"], store.read_into, 1, 3, slot(store))


def test_file_deleted_between_reads(path):
    store = build(path)
    file = expert_file(store)
    data = file.read_bytes()
    file.unlink()
    refused(CheckpointError, [file, "changed while in use"], store.read_into, 1, 3, slot(store))
    file.write_bytes(data)  # the same bytes, but another file: we cannot know that they are the same
    refused(CheckpointError, [file, "changed while in use"], store.read_into, 1, 3, slot(store))


def test_file_rewritten_between_reads(path):
    store = build(path)
    file = expert_file(store)
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    refused(CheckpointError, [file, "written again"], store.read_into, 1, 3, slot(store))


def test_other_experts_still_work_after_a_failure(path):
    store = build(path)
    victim = expert_file(store, 1, 3)
    whole = next((i, e) for i in range(3) for e in range(8) if victim not in store._plans[i].files(e))
    victim.unlink()
    with pytest.raises(CheckpointError):
        store.read_into(1, 3, slot(store))
    assert store.read_into(*whole, slot(store)) == store.slot_bytes


def test_file_changed_between_index_and_store(path):
    ckpt = Checkpoint.open(path)
    file = sorted(path.glob("*.safetensors"))[2]
    os.utime(file, ns=(0, 0))
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    load_config = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model))
    refused(CheckpointError, [file, "changed"], ExpertStore, model, ckpt, load_config)


def need_preadv():
    if not hasattr(os, "preadv"):
        pytest.skip("no preadv here")


@pytest.fixture(params=["fast", "slow"])
def store(request, path):
    store = build(path, dtype=torch.float32 if request.param == "fast" else torch.bfloat16)
    assert store.is_fast(0) == (request.param == "fast")
    yield store
    store.close()


def test_short_read(store, monkeypatch):
    need_preadv()
    monkeypatch.setattr(os, "preadv", lambda fd, bufs, offset: 0)
    words = [".safetensors", "early", "expert 3 of model.layers.1.mlp.experts"]
    refused(LoadError, words, store.read_into, 1, 3, slot(store))
    monkeypatch.undo()
    assert store.read_into(1, 3, slot(store)) == store.disk_bytes(1, 3)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_disk_error(code, store, monkeypatch):
    need_preadv()

    def fail(fd, bufs, offset):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", fail)
    words = [".safetensors", os.strerror(code), "expert 3 of model.layers.1.mlp.experts"]
    refused(LoadError, words, store.read_into, 1, 3, slot(store))
    monkeypatch.undo()
    assert store.read_into(1, 3, slot(store))


def test_reads_in_pieces_are_put_together(store, monkeypatch):
    """The system may return less than asked for, as often as it likes."""
    need_preadv()
    want = slot(store)
    store.read_into(1, 3, want)
    real, calls = os.preadv, []

    def little(fd, bufs, offset):
        calls.append(offset)
        return real(fd, [bufs[0][:1000]], offset)

    monkeypatch.setattr(os, "preadv", little)
    got = slot(store)
    assert store.read_into(1, 3, got) == store.disk_bytes(1, 3)
    assert bytes(got) == bytes(want) and len(calls) > 10


def test_system_without_preadv(store, monkeypatch):
    want = slot(store)
    store.read_into(2, 6, want)
    monkeypatch.delattr(os, "preadv", raising=False)
    got = slot(store)
    store.read_into(2, 6, got)
    assert bytes(got) == bytes(want)
    hammer(store, 4)


def hammer(store, threads, rounds=4):
    """Many threads read all experts; every read gives the same bytes."""
    todo = [(i, e) for i in range(len(store.layers)) for e in range(store.num_experts[i])]

    def read(key):
        buf = slot(store)
        store.read_into(*key, buf)
        return bytes(buf)

    want = {k: read(k) for k in todo}
    with ThreadPoolExecutor(threads) as pool:
        got = list(pool.map(read, todo * rounds))
    assert all(g == want[k] for k, g in zip(todo * rounds, got, strict=True))


def test_many_threads(store):
    hammer(store, 8)


def test_many_threads_unpack_fp8(tmp_path):
    from test_families_read import PER_EXPERT_FP8, load

    path = write_checkpoint(PER_EXPERT_FP8[1], tmp_path, dtype="bfloat16", fp8=True)
    _, store, _ = load(path, strip=True, dtype=torch.bfloat16, **unpacking(AutoConfig.from_pretrained(path)))
    hammer(store, 8)


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_files_are_closed(path):
    before = open_files()
    store = build(path)
    assert open_files() > before
    store.close()
    store.close()
    assert open_files() == before
    refused(LoadError, ["closed"], store.read_into, 0, 0, slot(store))
    file = sorted(path.glob("*.safetensors"))[2]
    os.truncate(file, 1000)
    with pytest.raises(CheckpointError):
        build(path)
    assert open_files() == before


def test_close_waits_for_nobody_but_lets_readers_finish(path, monkeypatch):
    need_preadv()
    store = build(path)
    real, inside, go = os.preadv, threading.Event(), threading.Event()

    def slow(fd, bufs, offset):
        inside.set()
        assert go.wait(10)
        return real(fd, bufs, offset)

    monkeypatch.setattr(os, "preadv", slow)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(store.read_into, 0, 0, slot(store))
        assert inside.wait(10)
        start = time.monotonic()
        store.close()
        assert time.monotonic() - start < 5
        go.set()
        assert read.result(10) == store.slot_bytes
    with pytest.raises(LoadError):
        store.read_into(0, 0, slot(store))


@pytest.mark.parametrize("expert", [-1, 8])
def test_no_such_expert(expert, path):
    store = build(path)
    with pytest.raises(IndexError, match="experts 0 to 7"):
        store.read_into(0, expert, slot(store))


def test_wrong_buffers(path):
    store = build(path)
    n = store.slot_bytes
    for bad in (memoryview(bytearray(n - 1)), memoryview(bytes(n))):
        with pytest.raises(ValueError, match="writable bytes"):
            store.read_into(0, 0, bad)
    flat = torch.zeros(n // 4, dtype=torch.int32)  # any flat buffer that is large enough will do
    assert store.read_into(0, 0, flat.numpy().data) == n


def test_padding_and_rest_of_the_slot_are_not_touched(tmp_path):
    path = write_checkpoint("gpt_oss", tmp_path)
    store = build(path)
    buf = memoryview(bytearray(b"\xaa" * (store.slot_bytes + 100)))
    store.read_into(0, 0, buf)
    used = set()
    for f in store.layout[store.layers[0]].fields.values():
        assert f.offset % 64 == 0
        used |= set(range(f.offset, f.offset + f.nbytes))
    assert all(buf[i] == 0xAA for i in range(len(buf)) if i not in used)


# -- parts ------------------------------------------------------------------------------------------------------------


def test_merge():
    a, b = Path("a"), Path("b")
    assert merge([]) == []
    assert merge([(a, 10, 5, 0), (a, 0, 10, 64)]) == [Run(a, 0, [(64, 10), (0, 5)])]
    assert merge([(a, 0, 5, 0), (a, 5, 5, 5), (a, 11, 1, 10)]) == [Run(a, 0, [(0, 10)]), Run(a, 11, [(10, 1)])]
    assert merge([(b, 0, 1, 1), (a, 0, 1, 0)]) == [Run(a, 0, [(0, 1)]), Run(b, 0, [(1, 1)])]


def test_neighbours_on_disk_are_one_read(tmp_path, monkeypatch):
    need_preadv()
    path = write_random_olmoe(tmp_path, n_layers=1, hidden=64, intermediate=32, n_experts=8, top_k=2, vocab=64, heads=4)
    store = build(path, dtype=torch.bfloat16)
    calls = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, bufs, offset: calls.append(len(bufs)) or real(fd, bufs, offset))
    store.read_into(0, 5, slot(store))
    assert calls == [2]  # down | gate, up: one call, two places


def test_read_run_end_of_file(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(bytes(range(100)))
    fds = {file: os.open(file, os.O_RDONLY)}
    buf = memoryview(bytearray(30))
    assert read_run(fds, Run(file, 10, [(20, 10), (0, 5), (7, 0)]), buf) == 15
    assert bytes(buf[20:30]) == bytes(range(10, 20)) and bytes(buf[:5]) == bytes(range(20, 25))
    refused(LoadError, [file, "10 bytes early"], read_run, fds, Run(file, 90, [(0, 20)]), buf)
    os.close(fds[file])


def test_layout_of_odd_shapes():
    layout = SlotLayout.of({"a": ((3, 5), torch.bfloat16), "b": ((1,), torch.float32), "c": ((0, 4), torch.float32)})
    assert [f.offset for f in layout.fields.values()] == [0, 64, 128] and layout.nbytes == 128
    flat = torch.arange(256, dtype=torch.uint8)
    views = layout.views(flat)
    assert views["a"].shape == (3, 5) and views["c"].numel() == 0
    assert views["a"].data_ptr() == flat.data_ptr()


def test_find_experts_leaves_shared_experts_alone():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(family_config("deepseek_v3"))
    assert list(find_experts(model)) == ["model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]


def test_private_names_of_transformers():
    """What we lean on without a promise from transformers; this test says what went when it goes."""
    import inspect

    from transformers import PreTrainedModel, core_model_loading

    names = "rename_source_key WeightConverter WeightRenaming MergeModulelist Concatenate build_glob_alternation"
    for name in names.split():
        assert hasattr(core_model_loading, name), name
    args = list(inspect.signature(PreTrainedModel._load_pretrained_model).parameters)
    assert args == ["model", "state_dict", "checkpoint_files", "load_config", "expected_keys"]
    for name in ("weight_mapping", "hf_quantizer", "dtype_plan"):
        assert hasattr(LoadStateDictConfig(), name), name
    assert callable(match)


# -- testing ----------------------------------------------------------------------------------------------------------


def test_same_seed_same_bytes(tmp_path):
    a, b = (write_checkpoint("mixtral", tmp_path / d, dtype="bfloat16", tokenizer=True) for d in "ab")
    for f in sorted(a.iterdir()):
        assert f.read_bytes() == (b / f.name).read_bytes(), f.name


def test_wrong_arguments(tmp_path):
    with pytest.raises(KeyError, match="no toy configuration"):
        write_checkpoint("nope", tmp_path)
    with pytest.raises(ValueError, match="gpt_oss"):
        write_checkpoint("olmoe", tmp_path, mxfp4=True)
    with pytest.raises(ValueError, match="260"):
        write_tokenizer(tmp_path, 128)


def test_write_shards(tmp_path):
    tensors = {f"t{i}": torch.full((10,), i) for i in range(5)}
    files = write_shards(tensors, tmp_path, 100)
    assert len(files) == 5
    (tmp_path / "config.json").write_text("{}")
    assert set(Checkpoint.open(tmp_path).tensors) == set(tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_big_checkpoint_is_valid(dtype, tmp_path):
    path = write_random_olmoe(
        tmp_path, n_layers=2, hidden=128, intermediate=64, n_experts=8, top_k=2, dtype=dtype, vocab=320, heads=4,
        shard_bytes=1 << 19,
    )  # fmt: skip
    ckpt = Checkpoint.open(path)
    assert len(ckpt.files) > 2
    store = build(path, dtype=getattr(torch, dtype))
    buf, seen = slot(store), set()
    for i in range(2):
        for e in range(8):
            store.read_into(i, e, buf)
            seen.add(bytes(buf))
    assert len(seen) == 16
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    assert model(torch.arange(9)[None]).logits.float().std() > 0.2
