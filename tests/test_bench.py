"The benchmark of a device, on the CPU and on the simulated device, with tiny models: that what it says is so."

import json

import numpy as np
import pytest
import torch

from expertflow import devicebench
from expertflow.cli import main
from expertflow.config import ExpertFlowError
from expertflow.devicebench import Forced, measure_device, recorded, routing_for, synthetic
from expertflow.flow import ExpertFlow
from expertflow.testing import write_checkpoint, write_random_olmoe

pytest_plugins = ["simdev.plugin"]
SHORT = {"new_tokens": 6, "rounds": 2, "prompt_tokens": 6, "sizes": [2**16]}


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("EXPERTFLOW_SHARED", str(tmp_path / "nothing"))
    return write_checkpoint("olmoe", tmp_path / "olmoe", dtype="bfloat16")


def on_cpu(path):
    return ["bench-device", "--device", "cpu", "--model", str(path), "--rounds", "1", "--max-new-tokens", "4"]


def test_on_the_cpu(path, capsys):
    assert main([*on_cpu(path), "--budgets", "100%", "25%", "--json"]) == 0
    r = json.loads(capsys.readouterr().out)
    whole, quarter = r["rows"]
    assert r["device"] == "cpu" and r["model"]["experts"] == 24 and r["routing"]["synthetic"] and "Zipf" in r["routing"]["source"]
    assert {x["direction"] for x in r["link"]} == {"within host memory"}
    assert r["model"]["expert_bytes"] in {x["bytes"] for x in r["link"]}
    assert whole["hit_rate"] == 1 and whole["bytes_per_token"] == 0 and whole["slots"] == 24
    assert 0 < quarter["hit_rate"] < 1 and quarter["bytes_per_token"] > 0 and quarter["slots"] == 6
    for row in r["rows"]:
        assert row["tokens_equal"] and 0 < row["peak"] <= row["planned"] and row["host_steps_per_token"] is None
        assert row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1] and 0 <= row["stall_share"] < 1
    text = devicebench.device_text(r)
    assert "synthetic" in text and "tokens equal" in text and "host memory" in text


def test_without_an_accelerator_it_says_so(capsys):
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    assert main(["bench-device"]) == 2
    err = capsys.readouterr().err
    assert "no accelerator" in err and "--device cpu" in err and err.count("\n") == 1


def test_on_a_device(sim, path):
    "The link is as fast as the device was told; all resident, no host step; traffic is that of the misses."
    sim.configure(link=(2e8, 1e8))  # far below what this machine could do
    expert = measure_device(path, budgets=["100%"], **SHORT)["model"]["expert_bytes"]
    before = sim.counters()
    how = SHORT | {"sizes": [2**22], "settings": {"system_reserve": "1MB"}}
    r = measure_device(path, budgets=["100%", "50%", "0.001%"], **how)
    after = sim.counters()
    rates = {(x["direction"], x["memory"]): x["bytes_per_second"] for x in r["link"] if x["bytes"] == 2**22}
    assert len(rates) == 4
    assert 0.6e8 < rates["host to device", "pinned"] <= 2.1e8 and 0.3e8 < rates["device to host", "pinned"] <= 1.05e8
    whole, half, least = r["rows"]
    assert whole["hit_rate"] == 1 and whole["host_steps_per_token"] == 0 and whole["bytes_per_token"] == 0
    assert half["hit_rate"] > least["hit_rate"] and 0 < half["host_steps_per_token"] <= least["host_steps_per_token"] == 3
    assert least["bytes_per_token"] == pytest.approx((1 - least["hit_rate"]) * 2 * 3 * expert, rel=0.35)
    for row in r["rows"]:
        assert row["tokens_equal"] and row["pageable_copies"] == 0, row
        assert row["slots"] * expert < row["peak"] <= row["planned"], row
    assert after["copies.h2d.pinned"] > before["copies.h2d.pinned"]


def test_plain_transformers_is_forced_too(path):
    "The same routing gives the same logits; another one gives others."
    plain = devicebench._plain(path, torch.device("cpu"))
    ids, trace = torch.arange(3, 13)[None], synthetic(3, 8, 2, 40, seed=1)
    with ExpertFlow.from_pretrained(path, gpu_memory_budget="25%", context=64, device="cpu") as flow, torch.no_grad():
        names, seen = flow.runtime.store.layers, []
        own = plain(ids).logits
        for model in (plain, flow.model):
            forced = Forced(model, names, trace.experts)
            seen += [model(ids).logits, model(ids).logits]  # the second one goes on in the trace
            forced.seek(0)
            seen.append(model(ids).logits)
            forced.remove()
        assert torch.equal(plain(ids).logits, own)
    a, b, c = seen[:3]
    assert torch.equal(a, c) and not torch.equal(a, b) and not torch.equal(a, own)
    assert all(torch.equal(x, y) for x, y in zip(seen[:3], seen[3:], strict=True))


def test_a_trace_that_ends_is_an_error(path):
    plain = devicebench._plain(path, torch.device("cpu"))
    forced = Forced(plain, [f"model.layers.{i}.mlp.experts" for i in range(3)], synthetic(3, 8, 2, 12).experts)
    with torch.no_grad():
        plain(torch.arange(3, 13)[None])
        with pytest.raises(ExpertFlowError, match="needs more tokens"):
            plain(torch.arange(3, 13)[None])
    forced.remove()


def test_a_recording_is_replayed(path, tmp_path, capsys):
    "Four experts, one used, of two layers of a recording, for a model of eight, two used."
    file = tmp_path / "rec.npz"
    np.savez(file, experts=np.random.default_rng(0).integers(0, 4, (400, 5, 1)).astype(np.uint8))
    args = [*on_cpu(path), "--budgets", "50%", "--json"]
    assert main([*args, "--trace", str(file)]) == 0
    routing = json.loads(capsys.readouterr().out)["routing"]
    assert not routing["synthetic"] and routing["source"] == "rec, 2 stretches side by side" and routing["tokens"] == 72
    for wrong in (path / "config.json", tmp_path / "none.npz"):
        assert main([*args, "--trace", str(wrong)]) == 2 and "no recorded routing" in capsys.readouterr().err
    for odd in (np.full((400, 5, 1), -1), np.full((400, 5, 1), 0.5), np.full((400, 5, 1), "a")):
        np.savez(file, experts=odd)
        assert main([*args, "--trace", str(file)]) == 2 and "whole numbers from 0 on" in capsys.readouterr().err
    for damaged in (b"", b"PK\x03\x04 and no more"):
        file.write_bytes(damaged)
        assert main([*args, "--trace", str(file)]) == 2 and "no recorded routing" in capsys.readouterr().err
    np.savez(file, experts=np.zeros((400, 5, 3), np.uint8))
    assert main([*args, "--trace", str(file)]) == 2 and "does not fit" in capsys.readouterr().err


def test_the_recording_at_hand(shared, tmp_path):
    "gpt-oss-20b for OLMoE's shape: more repeats than chance, and a hit rate that random routing does not reach."
    trace = routing_for(16, 64, 8, 600)
    assert not trace.synthetic and trace.source.startswith("gpt_oss_20b") and trace.experts.shape == (16, 600, 8)
    assert trace.experts.sort(-1).values.diff(dim=-1).min() > 0 and trace.experts.max() == 63
    assert trace.repeats() > 0.3 > 2 * synthetic(2, 64, 8, 600, 0.0, 0.0).repeats()
    file = next(shared.glob("data/routing/gpt-oss-20b/*.npz"))
    assert routing_for(16, 60, 4, 600).synthetic and recorded(file, 30, 32, 4, 5) is None
    path = write_random_olmoe(tmp_path, n_layers=2, hidden=64, intermediate=32, vocab=320, heads=4)
    row = measure_device(path, "cpu", ["50%"], **SHORT)["rows"][0]
    assert row["hit_rate"] > 0.6 and row["tokens_equal"]
