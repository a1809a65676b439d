"""The ledger against real checkpoints, real caches, real tensors, and hostile input."""
import contextlib
import json
import math
import random
import subprocess
import sys
import threading
import time

import pytest

from expertflow.config import BudgetError, CheckpointError, ConfigError, Share, UnsupportedModelError
from expertflow.ledger import (
    CANNOT,
    FITS,
    OFFLOAD,
    PARTS,
    Component,
    Inventory,
    Ledger,
    MoeLayer,
    _live_bytes,
    admit_kv,
    cache_tensors,
    inventory,
    make_plan,
    max_length,
    part_of,
    with_bits,
)

torch = pytest.importorskip("torch")
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from expertflow.testing import FAMILIES, family_config, write_checkpoint  # noqa: E402

GB = 10**9


def article(kv: int = 0) -> Inventory:
    "64 experts of 200 million weights in two bytes, and nothing else."
    parts = dict.fromkeys(PARTS, Component()) | {"routed_experts": Component(64 * 200_000_000, 64 * 400_000_000)}
    layer = MoeLayer("experts", 64, 2, 200_000_000, 400_000_000, 400_000_000)
    return Inventory("article", "bfloat16", parts, (layer,), kv=lambda batch, context: kv)


@pytest.fixture(scope="module")
def olmoe() -> Inventory: return inventory(family_config("olmoe"))


def bytes_of_files(path) -> int:
    "Bytes of tensors in safetensors files, from their sizes alone."
    return sum(f.stat().st_size - 8 - int.from_bytes(f.open("rb").read(8), "little") for f in path.glob("*.safetensors"))


def real_bytes(tensors) -> int: return sum({t.untyped_storage()._cdata: t.nbytes for t in tensors}.values())


def forward(model, batch: int, tokens: int):
    ids = torch.randint(3, 300, (batch, tokens))
    with torch.no_grad(): out = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, logits_to_keep=1)
    return out.get("cache") if out.get("cache") is not None else out.get("past_key_values")


# --- against transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_byte_of_a_family(family, tmp_path):
    "Stored bytes, loaded bytes, cache and activations: computed without weights, compared with the real thing."
    path = write_checkpoint(family, tmp_path, dtype="bfloat16")
    inv = inventory(path)
    assert inv.stored == bytes_of_files(path)
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    assert inv.nbytes == real_bytes([*model.parameters(), *model.buffers()])
    assert inv.params >= sum(p.numel() for p in model.parameters())
    assert all(c.params == 0 for part, c in inv.components.items() if part == "other" and family != "gemma4_text")
    for batch, tokens in ((1, 1), (1, 5), (3, 17), (1, 40), (2, 130)):
        with _live_bytes()([*model.parameters(), *model.buffers()]) as memory: cache = forward(model, batch, tokens)
        real, planned = real_bytes(cache_tensors(cache)), inv.kv_bytes(batch, tokens)
        assert abs(planned - real) <= 0.01 * real, (batch, tokens, planned, real)
        assert memory.peak <= planned + inv.workspace_bytes(batch, tokens)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "granitemoe", "qwen3_next", "minimax", "lfm2_moe"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_if_another_dtype(family, dtype, tmp_path):
    "A float32 checkpoint planned, and then loaded, in another type; some tensors insist on float32."
    path = write_checkpoint(family, tmp_path, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=True)
    inv = inventory(path, dtype=dtype)
    assert inv.dtype == dtype and inv.stored == bytes_of_files(path)
    assert inv.nbytes == real_bytes([*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4_text", "minimax", "qwen3_next", "deepseek_v3", "granitemoehybrid"])
def test_cache_while_generating(family):
    "After 60 single steps, past the sliding window."
    config = family_config(family)
    model = AutoModelForCausalLM.from_config(config).eval()
    out = model.generate(torch.randint(3, 300, (3, 10)), max_new_tokens=61, do_sample=False, return_dict_in_generate=True)
    cache = out.get("cache") if out.get("cache") is not None else out.past_key_values
    real, planned = real_bytes(cache_tensors(cache)), inventory(config).kv_bytes(3, 70)
    assert abs(planned - real) <= 0.01 * real, (planned, real)


def test_tied_weights_count_once(tmp_path):
    loose, tied = (inventory(write_checkpoint("olmoe", tmp_path / str(t), tie_word_embeddings=t)) for t in (False, True))
    assert loose.components["lm_head"].params == tied.components["embeddings"].params > 0
    assert tied.components["lm_head"] == Component()


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_quantised(kind, tmp_path):
    "Stored packed, run unpacked: both are told."
    path = write_checkpoint("gpt_oss" if kind == "mxfp4" else "qwen3_moe", tmp_path, dtype="bfloat16", **{kind: True})
    inv = inventory(path)
    routed = inv.components["routed_experts"]
    assert inv.stored == bytes_of_files(path)
    assert 0 < routed.stored < 0.6 * routed.nbytes and routed.nbytes == 2 * routed.params
    assert inv.components["other"].stored == 0


def test_config_alone(tmp_path, olmoe):
    (tmp_path / "config.json").write_text(family_config("olmoe").to_json_string())
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json", json.loads((tmp_path / "config.json").read_text())):
        inv = inventory(source)
        assert (inv.stored, inv.nbytes, inv.layers) == (0, olmoe.nbytes, olmoe.layers)


def test_weights_are_never_read(tmp_path, monkeypatch):
    "Nothing behind the header is touched: the weights may as well be a hole."
    import os
    path = write_checkpoint("mixtral", tmp_path)
    before = inventory(path)
    for file in path.glob("*.safetensors"):
        size, head = file.stat().st_size, 8 + int.from_bytes(file.open("rb").read(8), "little")
        os.truncate(file, head)
        os.truncate(file, size)
    monkeypatch.setattr("mmap.mmap", lambda *a, **k: pytest.fail("a file was mapped"))
    monkeypatch.setattr(os, "preadv", lambda *a: pytest.fail("weights were read"))
    assert inventory(path).as_dict() == before.as_dict()


def test_large_models_in_seconds():
    "DeepSeek-V3 by its published dimensions: 671 billion weights."
    config = AutoConfig.for_model("deepseek_v3", dtype="bfloat16", num_nextn_predict_layers=0)
    start = time.process_time()
    inv = inventory(config)
    assert 670e9 < inv.params < 672e9
    assert (inv.moe_layers, inv.top_k, set(inv.num_experts)) == (58, 8, {256})
    assert inv.kv_bytes(1, 4096) == 4096 * 61 * (512 + 64) * 2      # the latent vector and its rotary part
    assert make_plan(inv, 80 * GB, prompt=512).verdict == OFFLOAD
    assert time.process_time() - start < 60


def test_loops_are_extrapolated():
    "A model whose layers loop over tokens is planned from short prompts; that is close, and not below."
    config = family_config("jamba")
    inv, model = inventory(config), AutoModelForCausalLM.from_config(config).eval()
    with _live_bytes()([*model.parameters(), *model.buffers()]) as memory: forward(model, 1, 700)
    planned = inv.kv_bytes(1, 700) + inv.workspace_bytes(1, 700)
    assert memory.peak <= planned <= 1.6 * memory.peak


@pytest.mark.parametrize("device, attention", [("cpu", "eager"), ("cuda", "eager"), ("another", None)])
def test_attention_that_writes_out_all_scores(device, attention):
    "Is planned for where it is asked for, or where the device has no kernel that avoids it."
    config = family_config("olmoe")
    inv, fused = inventory(config, device=device, attention=attention), inventory(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with _live_bytes()([*model.parameters(), *model.buffers()]) as memory: forward(model, 1, 400)
    planned, without = (x.kv_bytes(1, 400) + x.workspace_bytes(1, 400) for x in (inv, fused))
    assert memory.peak <= planned <= 1.6 * memory.peak
    assert without < memory.peak


def test_formula_where_a_model_does_not_run(monkeypatch, olmoe):
    measured = olmoe.workspace_bytes(2, 100)
    monkeypatch.setattr("expertflow.ledger.Skeleton.forward", lambda *a: 1 / 0)
    inv = inventory(family_config("olmoe"))
    assert "ZeroDivisionError" in inv.notes[0] and inv.top_k == 2
    assert inv.kv_bytes(2, 100) == olmoe.kv_bytes(2, 100)
    assert inv.workspace_bytes(2, 100) >= measured


# --- budgets --------------------------------------------------------------------------------------------------------


def test_articles_numbers():
    assert article().components["routed_experts"].nbytes == 25_600_000_000
    for kv, left in ((1.5, 6.0), (2.0, 5.5)):
        plan = make_plan(article(int(kv * GB)), 8 * GB, system=GB // 2)
        assert plan.usable == plan.for_experts == left * GB
        assert plan.slots == int(left * GB) // 400_000_000 and plan.verdict == OFFLOAD


@pytest.mark.parametrize("seed", range(20))
def test_smallest_budget_is_exact(seed, olmoe):
    rng = random.Random(seed)
    how = {"system": rng.randrange(10**6), "context": rng.randrange(1, 200), "batch": rng.randrange(1, 4),
           "staging": rng.randrange(10**5), "min_slots": rng.randrange(1, 9)}
    plan = make_plan(olmoe, 10**6, **how)
    assert plan.min_slots == max(how["min_slots"], olmoe.top_k)
    at, below = make_plan(olmoe, plan.smallest_budget, **how).check(), make_plan(olmoe, plan.smallest_budget - 1, **how)
    assert (at.verdict, at.slots, below.verdict, below.slots) == (OFFLOAD, plan.min_slots, CANNOT, 0)
    with pytest.raises(BudgetError, match=f"{plan.smallest_budget}B.*raise gpu_memory_budget"): below.check()
    assert make_plan(olmoe, plan.resident_budget, **how).verdict == FITS
    assert make_plan(olmoe, plan.resident_budget - 1, **how).slots == olmoe.total_experts - 1
    assert at.for_experts >= at.slots * at.slot_bytes and at.usable == at.nominal - at.system - at.kv


def test_shares(olmoe):
    for share, slots in ((1.0, 24), (0.5, 12), (0.26, 7), (1e-9, 2)):
        plan = make_plan(olmoe, Share(share))
        assert plan.slots == slots and make_plan(olmoe, plan.nominal).slots == slots
    plan = make_plan(olmoe, Share(1.0), available=make_plan(olmoe, Share(0.5)).nominal)
    assert (plan.slots, plan.verdict) == (12, OFFLOAD)
    assert make_plan(olmoe, None, available=GB).verdict == FITS


def test_bytes_per_token(olmoe):
    plan = make_plan(olmoe, GB)
    assert plan.bytes_per_token(0) == olmoe.moe_layers * olmoe.top_k * olmoe.expert_bytes
    assert plan.bytes_per_token(1) == 0 and plan.bytes_per_token(0.75) == plan.bytes_per_token(0) // 4
    for bad in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError, match="hit_rate"): plan.bytes_per_token(bad)


def test_fewer_bits(olmoe):
    four, eight = with_bits(olmoe, 4), inventory(family_config("olmoe"), expert_bits=8)
    assert four.dense_bytes == eight.dense_bytes == olmoe.dense_bytes
    assert olmoe.layers[0].nbytes / four.layers[0].nbytes == pytest.approx(32 / 4.5, rel=0.01)
    assert four.expert_bytes < eight.expert_bytes < olmoe.expert_bytes and "4 bits" in str(make_plan(four, GB))
    with pytest.raises(ConfigError, match="expert_bits=3"): with_bits(olmoe, 3)


def test_plans_speak(olmoe):
    plan = make_plan(olmoe, 10**6, context=5000)
    assert json.loads(json.dumps(plan.as_dict()))["smallest_budget"] == plan.smallest_budget
    assert json.loads(json.dumps(olmoe.as_dict()))["components"]["router"]["params"] == 3 * 8 * 64
    assert plan.verdict in str(plan) and "beyond the 1024 tokens" in str(plan) and "routed_experts" in str(olmoe)
    assert "only 1.00 MB are free" in str(make_plan(olmoe, GB, available=10**6))


# --- hostile input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [{"context": 0}, {"context": -1}, {"batch": 0}, {"batch": 1.5}, {"batch": True}, {"context": "9"},
                                 {"system": -1}, {"system": math.nan}, {"staging": 0.5}])
def test_bad_sizes(bad, olmoe):
    with pytest.raises(ConfigError, match=f"{next(iter(bad))}="): make_plan(olmoe, GB, **bad)


@pytest.mark.parametrize("budget", [math.nan, math.inf, -1, 1.5, True, "6GB"])
def test_bad_budgets(budget, olmoe):
    with pytest.raises(ConfigError, match="budget="): make_plan(olmoe, budget)


def test_no_budget_at_all(olmoe):
    with pytest.raises(ConfigError, match="name a budget"): make_plan(olmoe, None)
    assert make_plan(olmoe, 0).verdict == CANNOT


@pytest.mark.parametrize("text, error, match", [
    ("{}", CheckpointError, "no model_type"), ("[]", CheckpointError, "not a table"), ("{", CheckpointError, "cannot be read"),
    ('{"model_type": 7}', CheckpointError, "no model_type"), ('{"model_type": "nonesuch"}', UnsupportedModelError, "nonesuch"),
    ('{"model_type": "llama"}', UnsupportedModelError, "experts"), ('{"model_type": "dbrx"}', UnsupportedModelError, "dbrx"),
    ('{"model_type": "switch_transformers"}', UnsupportedModelError, "switch"),
    ('{"model_type": "olmoe", "hidden_size": -5}', UnsupportedModelError, "olmoe"),
    ('{"model_type": "olmoe", "num_hidden_layers": "many"}', UnsupportedModelError, "olmoe"),
    ('{"model_type": "olmoe", "num_attention_heads": 0}', UnsupportedModelError, "olmoe"),
])
def test_bad_configurations(text, error, match, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=match) as e: inventory(tmp_path)
    assert "\n" not in str(e.value)


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"): inventory(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"): inventory(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="dtype='int8'"): inventory(family_config("olmoe"), dtype="int8")


def test_names():
    assert part_of("something.new") == "other"
    assert part_of("model.layers.0.mlp.experts.0.gate_proj.weight_scale_inv") == "routed_experts"
    assert part_of("model.layers.0.self_attn.gate.weight") == "attention"


def test_imports_without_torch():
    code = "import sys, expertflow.ledger; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- live -----------------------------------------------------------------------------------------------------------


def test_ledger_refuses_and_keeps_its_state():
    ledger = Ledger({"device": 100, "host": 10})
    ledger.reserve("device", "a", 60)
    before = ledger.snapshot()
    for call, match in ((lambda: ledger.reserve("device", "b", 41), r"b wants 41 B.*40 B.*are free.*a 60 B"),
                        (lambda: ledger.resize("device", "a", 101), r"a wants 101 B.*instead of 60 B"),
                        (lambda: ledger.set_capacity("device", 59), "60 B are taken")):
        with pytest.raises(BudgetError, match=match): call()
    for wrong in (lambda: ledger.reserve("device", "a", 1), lambda: ledger.release("device", "b"), lambda: ledger.used("disk"),
                  lambda: ledger.reserve("device", "c", -1), lambda: ledger.resize("device", "a", math.nan)):
        with pytest.raises(ValueError): wrong()
    assert ledger.snapshot() == before
    ledger.resize("device", "a", 100)
    ledger.resize("device", "a", 10)
    assert (ledger.peak("device"), ledger.release("device", "a"), ledger.used("device")) == (100, 10, 0)
    with pytest.raises(RuntimeError), ledger.hold("host", "kv", 10):
        assert ledger.free("host") == 0
        raise RuntimeError
    assert ledger.free("host") == 10 and "peak 100 B" in ledger.table()


def test_ledger_under_threads():
    "Many threads, random calls: never above capacity, and everything is given back."
    ledger, worst = Ledger({"device": 1000}), []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            with contextlib.suppress(BudgetError): ledger.resize("device", f"t{seed}", rng.randrange(400))
            snapshot = ledger.snapshot()["device"]
            worst.append(snapshot["used"])
            assert snapshot["used"] == sum(snapshot["reservations"].values()) <= 1000
        ledger.release("device", f"t{seed}")
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(worst) == 8 * 300 and ledger.used("device") == 0 and max(worst) <= ledger.peak("device") <= 1000


def test_admission(olmoe):
    reserved = olmoe.kv_bytes(2, 100)
    assert admit_kv(olmoe, reserved, 2, 100) == reserved == admit_kv(olmoe, reserved, 1, 200)
    with pytest.raises(BudgetError, match=r"100 tokens would fit.*lower max_new_tokens"): admit_kv(olmoe, reserved, 2, 101)
    with pytest.raises(BudgetError, match="not even one"): admit_kv(olmoe, 0, 1, 1)
    assert max_length(olmoe, 10**12, 1) == 1024 and max_length(olmoe, reserved - 1, 2) == 99
    with pytest.raises(ConfigError, match="batch=0"): admit_kv(olmoe, reserved, 0, 5)
