"""How good the layer-ahead predictors are: on text that they have not seen, by amount of data, and by domain.

    python tests/bench_predictor.py [--model tiny-moe] [--windows 64] [--no-training] [--out FILE]

Texts are those of the shared folder (English prose, arithmetic, Python, Chinese documentation): the first 92 % of each
are for training, the last 3 % for judging, and a part between for early stopping and calibration. Windows of 256
tokens, as many of each domain. All recall is at k, the mean over the layers looked from except the first two, at 1, 2,
3 and 4 layers ahead.

- gate look-ahead, and the predictor in the package, per domain and over all;
- the share of a decode step's time that predicting takes (one process, one thread, medians);
- unless --no-training: closed form and gradient with a sixteenth, a quarter and all of the training windows;
- and one predictor trained on all domains against the same one tuned to each of them.
"""
import argparse
import json
import lzma
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from expertflow.flow import find_checkpoint
from expertflow.predictor import LayerAhead, Streams, evaluate_predictor, gather, load_predictor, time_share, train_predictor
from expertflow.taps import find_taps

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "text"
DOMAINS = {"prose": "prose/state_union", "math": "math/gsm8k_train", "code": "code/python_stdlib", "zh": "zh/python_docs_zh"}
PARTS = {"train": (0.0, 0.92), "valid": (0.93, 0.965), "test": (0.97, 1.0)}
FIELDS = ("residual", "ids", "weights")
T = 256


def windows(tokenizer, domain, part, n):
    "Token ids [n, T], spread evenly over a part of a domain's text."
    with lzma.open(DATA / f"{DOMAINS[domain]}.txt.xz", "rt", encoding="utf-8") as f:
        text = f.read()
    low, high = (int(share * len(text)) for share in PARTS[part])
    size = 8 * T  # characters that are surely enough
    rows = []
    for at in np.linspace(low, high - size, n).astype(int):
        rows.append(tokenizer(text[at : at + size], add_special_tokens=False).input_ids[1 : T + 1])
    return torch.tensor(rows)


def joined(parts):
    "Streams of several sets of sequences as one."
    layers = range(len(parts[0].ids))
    return Streams(T, *([torch.cat([getattr(p, name)[i] for p in parts]) for i in layers] for name in FIELDS))


def head(s, n):
    "The first `n` of them."
    return Streams(T, *([x[: n * T] for x in getattr(s, name)] for name in FIELDS))


def figures(p, s):
    "Recall at k and calibration error at 1 to 4 layers ahead, mean over the layers looked from except the first two."
    rows = [r for r in evaluate_predictor(p, s).rows if r["layer"] >= 2]
    at = [[r for r in rows if r["distance"] == d] for d in range(1, p.ahead + 1)]
    return {name: [round(float(np.mean([r[name] for r in some])), 4) for some in at] for name in ("recall", "precision_n", "ece")}


def main():
    ask = argparse.ArgumentParser()
    ask.add_argument("--model", default="tiny-moe")
    ask.add_argument("--windows", type=int, default=64)
    ask.add_argument("--no-training", action="store_true")
    ask.add_argument("--out")
    a = ask.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    path = find_checkpoint(a.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    taps = find_taps(model)
    n = {"train": a.windows, "valid": max(8, a.windows // 4), "test": max(4, a.windows // 4)}
    kinds = [part for part in PARTS if part == "test" or not a.no_training]
    ids = {(d, part): windows(tokenizer, d, part, n[part]) for d in DOMAINS for part in kinds}
    data = {key: gather(model, taps, x) for key, x in ids.items()}
    test = {"all": joined([data[d, "test"] for d in DOMAINS])} | {d: data[d, "test"] for d in DOMAINS}
    shipped = load_predictor(None, model, taps)
    out = {"model": a.model, "windows": n, "tokens_in_a_window": T, "parameters": shipped.parameters()}
    for name, p in {"gate look-ahead": LayerAhead(taps, shared=False), "in the package": shipped}.items():
        out[name] = {where: figures(p, s) for where, s in test.items()}
        out[name]["time"] = time_share(model, p, ids["prose", "test"][:1, :32], 64)
        print(name, json.dumps(out[name]), flush=True)
    if not a.no_training:
        train, valid = (joined([data[d, part] for d in DOMAINS]) for part in ("train", "valid"))
        shuffled = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
        rows = (shuffled[:, None] * T + torch.arange(T)).flatten()
        train = Streams(T, *([x[rows] for x in getattr(train, name)] for name in FIELDS))
        with tempfile.TemporaryDirectory() as tmp:

            def learn(s, v, name, **kw):
                return train_predictor(model, s, v, f"{tmp}/{name}", context=shipped.context, progress=False, **kw)

            out["by data"] = {}
            for share in (16, 4, 1):
                some = head(train, len(train) // share)
                for epochs in (0, 2):
                    p = learn(some, valid, f"{share}-{epochs}", epochs=epochs)
                    out["by data"][f"{len(some) * T} tokens, {'gradient' if epochs else 'closed form'}"] = figures(p, test["all"])
            print("by data", json.dumps(out["by data"]), flush=True)
            tuned = {"general": p}
            for d in DOMAINS:
                tuned[d] = learn(data[d, "train"], data[d, "valid"], d, epochs=2, start=f"{tmp}/1-2")
            out["by domain"] = {name: {d: figures(p, test[d])["recall"] for d in DOMAINS} for name, p in tuned.items()}
            print("by domain", json.dumps(out["by domain"]), flush=True)
    if a.out:
        Path(a.out).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
