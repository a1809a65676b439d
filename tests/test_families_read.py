"""Every expert of every family, read one at a time, against the same model loaded whole by transformers."""

import json

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from expertflow.checkpoint import Checkpoint, ExpertStore, unpacking
from expertflow.config import UnsupportedModelError
from expertflow.flow import ExpertFlow
from expertflow.ledger import inventory
from expertflow.testing import FAMILIES, write_checkpoint

logging.set_verbosity_error()
logging.disable_progress_bar()
PER_EXPERT_FP8 = ["deepseek_v3", "qwen3_moe", "mixtral", "glm4_moe", "minimax_m2", "olmoe", "jamba", "hunyuan_v1_moe"]


def load(path, strip, **kw):
    """(model, store, unexpected names); with `strip`, the experts' parameters are removed before loading."""
    found = {}
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.from_pretrained(path))]

    def _load_pretrained_model(model, state_dict, files, load_config, expected_keys=None):
        store = found["store"] = ExpertStore(model, ckpt, load_config)
        if strip:
            for name in store.layers:
                module = model.get_submodule(name)
                for param in list(store.layout[name].fields):
                    del module._parameters[param]
                module._is_hf_initialized = True
        info, index = cls._load_pretrained_model(model, state_dict, files, load_config, expected_keys)
        found["unexpected"] = set(info.unexpected_keys)
        found["missing"] = set(info.missing_keys)
        return info, index

    body = {"_load_pretrained_model": staticmethod(_load_pretrained_model), "__module__": cls.__module__}
    ckpt = Checkpoint.open(path)
    with ckpt.for_transformers() as folder:
        model = type(cls.__name__, (cls,), body).from_pretrained(folder, **kw).eval()
    return model, found["store"], found


def compare(path, **kw):
    """All experts read through the store equal the loaded parameters, bit for bit; returns the store."""
    model, store, _ = load(path, strip=False, **kw)
    assert store.layers and store.slot_bytes % 64 == 0
    for i, name in enumerate(store.layers):
        module = model.get_submodule(name)
        params = dict(module.named_parameters(recurse=False))
        assert set(params) == set(store.layout[name].fields)
        for e in range(store.num_experts[i]):
            flat = torch.full((store.slot_bytes,), 0xFF, dtype=torch.uint8)
            assert store.read_into(i, e, flat.numpy().data) == store.disk_bytes(i, e)
            for param, view in store.views(i, flat).items():
                want = params[param][e]
                assert view.dtype == want.dtype and view.shape == want.shape
                same = torch.equal(view.contiguous().view(torch.uint8), want.detach().contiguous().view(torch.uint8))
            assert same, (name, param, e)
    store.close()
    return store


def test_no_family_is_left_out_unless_it_must_be(left_out, tmp_path):
    "Older transformers have one whose experts choose for themselves. Who has such a model is told what to do."
    assert set(left_out) <= {"aria_text"}
    for family in left_out:
        path = write_checkpoint(family, tmp_path / family)
        for refuse in (ExpertFlow.from_pretrained, inventory):
            with pytest.raises(UnsupportedModelError, match=f"{family}: transformers {transformers.__version__} .* try a newer"):
                refuse(path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_experts_equal(family, dtype, tmp_path):
    path = write_checkpoint(family, tmp_path, dtype=dtype)
    assert len(Checkpoint.open(path).files) > 2
    store = compare(path, dtype=getattr(torch, dtype))
    assert all(map(store.is_fast, range(len(store.layers))))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_rest_loads_without_experts(family, tmp_path):
    path = write_checkpoint(family, tmp_path, dtype="bfloat16")
    whole = AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict()
    model, store, found = load(path, strip=True, dtype="auto")
    left = model.state_dict()
    experts = {f"{name}.{p}" for name in store.layers for p in store.layout[name].fields}
    assert set(whole) - set(left) == experts and experts <= store.expert_targets
    assert found["unexpected"] and found["unexpected"] <= store.expert_targets | store.expert_keys
    assert not found["missing"] - experts
    for name, t in left.items():
        assert torch.equal(t, whole[name]), name
    store.close()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fused_tensors(family, tmp_path):
    path = write_checkpoint(family, tmp_path, dtype="bfloat16", fused=True, shard_bytes=None)
    store = compare(path, dtype=torch.bfloat16)
    assert all(map(store.is_fast, range(len(store.layers))))
    assert len(store.expert_keys) == sum(len(lay.fields) for lay in store.layout.values())


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "granitemoe", "nemotron_h", "deepseek_v3", "minimax_m2"])
@pytest.mark.parametrize(("on_disk", "wanted"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float16")])
def test_other_dtype(family, on_disk, wanted, tmp_path):
    path = write_checkpoint(family, tmp_path, dtype=on_disk)
    store = compare(path, dtype=getattr(torch, wanted))
    assert not store.is_fast(0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", PER_EXPERT_FP8)
def test_fp8(family, dtype, tmp_path):
    path = write_checkpoint(family, tmp_path, dtype="bfloat16", fp8=True)
    store = compare(path, dtype=getattr(torch, dtype), **unpacking(AutoConfig.from_pretrained(path)))
    assert not store.is_fast(0)
    assert store.disk_bytes(0, 0) < store.slot_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mxfp4(dtype, tmp_path):
    path = write_checkpoint("gpt_oss", tmp_path, dtype="bfloat16", mxfp4=True)
    store = compare(path, dtype=getattr(torch, dtype), **unpacking(AutoConfig.from_pretrained(path)))
    assert not store.is_fast(0) and store._convert.table


def test_mxfp4_with_extreme_scales(tmp_path):
    """Outside the range where the table is exact by construction, transformers' code does the work."""
    path = write_checkpoint("gpt_oss", tmp_path, dtype="bfloat16", mxfp4=True, shard_bytes=None)
    from safetensors.torch import load_file, save_file

    tensors = {k: t.clone() for k, t in load_file(path / "model.safetensors").items()}
    for k, t in tensors.items():
        if k.endswith("_scales"):
            t[3, 0, :] = torch.tensor([0, 255, 27, 228, 1, 254][: t.shape[-1]], dtype=torch.uint8)
            t[5, -1, -1] = 254
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with_nan = compare(path, dtype=torch.bfloat16, **unpacking(AutoConfig.from_pretrained(path)))
    assert with_nan._convert.table


@pytest.mark.parametrize("kind", ["single", "no index", "fp16", "one big shard"])
def test_ways_to_save(kind, tmp_path):
    how = {
        "single": {"shard_bytes": None},
        "no index": {"index": False},
        "fp16": {"dtype": "float16"},
        "one big shard": {"shard_bytes": 200_000},
    }[kind]
    compare(write_checkpoint("qwen3_moe", tmp_path, **how), dtype="auto")


def test_one_expert(tmp_path):
    path = write_checkpoint("mixtral", tmp_path, num_local_experts=1, num_experts_per_tok=1)
    compare(path, dtype="auto")


def test_more_than_ten_experts_are_in_numeric_order(tmp_path):
    compare(write_checkpoint("olmoe", tmp_path, num_experts=23), dtype="auto")


def test_links_like_those_of_the_hub_cache(tmp_path):
    blobs = write_checkpoint("olmoe", tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for i, f in enumerate(sorted(blobs.iterdir())):
        (blobs / f"{i:040x}").write_bytes(f.read_bytes())
        f.unlink()
        (snapshot / f.name).symlink_to(blobs / f"{i:040x}")
    compare(snapshot, dtype="auto")


def test_layers_of_different_shape_share_slots(tmp_path):
    """Layers may differ in geometry; a slot is as large as the largest needs."""
    path = write_checkpoint("olmoe", tmp_path, fused=True, shard_bytes=None)
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    half = {
        "model.layers.1.mlp.experts.gate_up_proj": lambda t: t[:, :32].contiguous(),
        "model.layers.1.mlp.experts.down_proj": lambda t: t[:, :, :16].contiguous(),
    }
    save_file({k: half.get(k, lambda t: t)(t) for k, t in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    ckpt = Checkpoint.open(path)
    from types import SimpleNamespace

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        experts = model.model.layers[1].mlp.experts
        experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj[:, :32])
        experts.down_proj = torch.nn.Parameter(experts.down_proj[:, :, :16])
    config = SimpleNamespace(weight_mapping=[], dtype_plan={}, hf_quantizer=None)
    store = ExpertStore(model, ckpt, config)
    sizes = [store.layout[n].nbytes for n in store.layers]
    assert sizes[1] < sizes[0] == sizes[2] == store.slot_bytes
    flat = torch.zeros(store.slot_bytes, dtype=torch.uint8)
    store.read_into(1, 5, flat.numpy().data)
    got = store.views(1, flat)["down_proj"]
    assert torch.equal(got, tensors["model.layers.1.mlp.experts.down_proj"][5, :, :16])


def test_transpose_with_checked_dims(tmp_path):
    """A converter that compares with the parameter's shape before it transposes (qwen3_vl_moe) works on one expert."""
    from types import SimpleNamespace

    from safetensors.torch import load_file, save_file
    from transformers.core_model_loading import Transpose, WeightConverter

    path = write_checkpoint("olmoe", tmp_path, fused=True, shard_bytes=None)
    whole = load_file(path / "model.safetensors")
    flipped = {k: t.transpose(1, 2).contiguous() if k.endswith("gate_up_proj") else t for k, t in whole.items()}
    flipped = {k: t.transpose(1, 2).contiguous() if k.endswith("gate_up_proj") else t for k, t in whole.items()}
    for k in list(flipped):
        if k.endswith("gate_up_proj"):  # not square, or the check would see no difference
            whole[k] = whole[k][:, :48]
            flipped[k] = flipped[k][:, :, :48].contiguous()
    save_file(flipped, path / "model.safetensors", {"format": "pt"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj = torch.nn.Parameter(layer.mlp.experts.gate_up_proj[:, :48])
    conv = WeightConverter("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", [Transpose(1, 2, check_dims=True)])
    config = SimpleNamespace(weight_mapping=[conv], dtype_plan={}, hf_quantizer=None)
    store = ExpertStore(model, Checkpoint.open(path), config)
    assert not store.is_fast(0)
    flat = torch.zeros(store.slot_bytes, dtype=torch.uint8)
    store.read_into(2, 3, flat.numpy().data)
    assert torch.equal(store.views(2, flat)["gate_up_proj"], whole["model.layers.2.mlp.experts.gate_up_proj"][3])


def test_published_config_spelling(tmp_path):
    """Hub configs say num_experts where newer versions write num_local_experts."""
    path = write_checkpoint("qwen3_moe", tmp_path)
    config = json.loads((path / "config.json").read_text())
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
        (path / "config.json").write_text(json.dumps(config))
    compare(path, dtype="auto")
