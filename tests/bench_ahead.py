"""Look-ahead beside the baselines that see ids alone, and layer by layer: recall at k on text that nobody has seen.

    python tests/bench_ahead.py [--out nbs/07c_ahead.json]

For both bundled models: windows of 256 tokens of each kind of text in the shared folder, tables counted on the part for training,
everybody judged on the part for testing. Means over the layers looked from except the first two, at 1 to 4 layers ahead;
and by layer, with a reliability curve of the predictor in the package.
"""
import argparse
import json
from pathlib import Path

import numpy as np
import torch
from bench_predictor import DOMAINS, T, windows
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from expertflow.flow import find_checkpoint
from expertflow.predictor import LayerAhead, batches, corrected, evaluate_predictor, gather, load_predictor, margin
from expertflow.quality import (
    Adversary,
    Baseline,
    CoOccurrence,
    Decayed,
    PreviousToken,
    Random,
    Routes,
    TokenTable,
    calibration_curve,
    compare,
)
from expertflow.taps import find_taps

BASELINES = {"random": Random, "frequency": Baseline, "decayed frequency": Decayed, "previous token": PreviousToken,
             "token table": TokenTable, "co-occurrence": CoOccurrence, "adversarial": Adversary}
AHEAD = (1, 2, 3, 4)


def routes(streams, ids, E):
    chosen = np.stack([x.numpy() for x in streams.ids], 1)
    return Routes(chosen, [E] * chosen.shape[1], np.repeat(np.arange(len(ids)), T), ids.flatten().numpy())


def by_distance(rows):
    "Mean over the layers looked from, except the first two."
    return [round(float(np.mean([r["recall"] for r in rows if r["distance"] == d])), 4) for d in AHEAD]


def reliability(p, streams):
    "Mean probability and share that came true, in ten bins, over all layers and distances."
    said, true = [], []
    for layer in range(len(p.taps) - 1):
        for X, base, _, y in batches(p, streams, layer):
            z = margin(corrected(p.corrections.get(layer), X, base), p.taps[layer + 1].top_k)
            curve = p.curve[layer, : z.shape[1]]
            said.append(torch.sigmoid(z * curve[:, :1] + curve[:, 1:]).flatten(0, 1))
            true.append(y.flatten(0, 1) > 0)
    curve = calibration_curve(torch.cat(said).numpy(), torch.cat(true).numpy(), 10)[:, :2]
    return [[round(float(x), 4) for x in column] for column in curve.T]


def figures(name, train, test):
    path = find_checkpoint(name)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    taps = find_taps(model)
    ids = {part: torch.cat([windows(tokenizer, d, part, n) for d in DOMAINS]) for part, n in (("train", train), ("test", test))}
    seen = {part: gather(model, taps, x, progress=True) for part, x in ids.items()}
    E, L = max(t.num_experts for t in taps), len(taps)
    r = {part: routes(seen[part], ids[part], E) for part in ids}
    out = {"tokens": {part: x.numel() for part, x in ids.items()}, "recall": {}, "by layer": {}}
    for who, kind in BASELINES.items():
        fitted, rows = kind().fit(r["train"]), []
        for d in AHEAD:
            table = compare([fitted], r["test"], distances=[d], layers=range(2 + d, L))
            rows += table.as_dict()
        out["recall"][who] = by_distance(rows)
        print(name, who, out["recall"][who], flush=True)
    shipped = load_predictor(None, model, taps)
    for who, p in {"gate look-ahead": LayerAhead(taps, shared=False), "in the package": shipped}.items():
        rows = evaluate_predictor(p, seen["test"]).rows
        out["recall"][who] = by_distance([x for x in rows if x["layer"] >= 2])
        out["by layer"][who] = {d: [round(x["recall"], 4) for x in rows if x["distance"] == d] for d in AHEAD}
        print(name, who, out["recall"][who], flush=True)
    out["reliability"] = reliability(shipped, seen["test"])
    return out


def main():
    ask = argparse.ArgumentParser()
    ask.add_argument("--out")
    a = ask.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    out = {"tiny-moe": figures("tiny-moe", 64, 16), "smollm2-moe": figures("smollm2-moe", 16, 8)}
    if a.out:
        Path(a.out).write_text(json.dumps(out) + "\n")


if __name__ == "__main__":
    main()
