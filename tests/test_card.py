"Files of trained parts: whole or absent, and never for the wrong model."
import json
import os
import stat

import pytest
import torch
from safetensors.torch import save_file

from expertflow import card as module
from expertflow.card import load_card, read_card, save_card
from expertflow.config import CheckpointError

CARD = {"kind": "demo", "model": "0" * 16, "name": "tiny"}


def test_round_trip(tmp_path):
    file = tmp_path / "deep" / "p.safetensors"
    t = {"a": torch.randn(3, 4).to(torch.bfloat16), "b": torch.arange(6).reshape(2, 3).T}
    save_card(file, t, CARD | {"text": "Größe"})
    got, card = load_card(file, "demo", "0" * 16)
    assert all(torch.equal(got[k], t[k]) for k in t) and card["text"] == "Größe" and read_card(file) == card
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o644


def test_a_broken_write_leaves_what_was_there(tmp_path, monkeypatch):
    file = tmp_path / "p.safetensors"
    save_card(file, {"a": torch.ones(1)}, CARD)
    before = file.read_bytes()
    def broken(*_): raise OSError("disk full")
    monkeypatch.setattr(module.os, "replace", broken)
    with pytest.raises(OSError, match="disk full"): save_card(file, {"a": torch.zeros(1)}, CARD)
    assert file.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["p.safetensors"]


@pytest.mark.parametrize("metadata, word", [
    (None, "no card"), ({"expertflow": "[]"}, "no card"), ({"expertflow": "{"}, "damaged"),
    ({"expertflow": '{"kind": "demo"}'}, "no card"),
    ({"expertflow": json.dumps(CARD | {"format": 99})}, "update"),
    ({"expertflow": json.dumps(CARD | {"format": 1, "kind": "x"})}, "'x'"),
    ({"expertflow": json.dumps(CARD | {"format": 1, "model": "1" * 16})}, r"\(tiny\), not for"),
])
def test_files_that_are_something_else(tmp_path, metadata, word):
    file = tmp_path / "p.safetensors"
    save_file({"a": torch.ones(1)}, file, metadata=metadata)
    with pytest.raises(CheckpointError, match=word): load_card(file, "demo", "0" * 16)


def test_missing_damaged_and_incomplete(tmp_path):
    with pytest.raises(CheckpointError, match="no file"): read_card(tmp_path / "x")
    (tmp_path / "y").write_bytes(b"hello")
    with pytest.raises(CheckpointError, match="damaged"): read_card(tmp_path / "y")
    with pytest.raises(ValueError, match="model"): save_card(tmp_path / "z", {}, {"kind": "demo"})
