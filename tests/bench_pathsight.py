"""What the path predictor is worth to the forecast policy: loads against MIN on held-out text, token by token.

    python tests/bench_pathsight.py MODEL [--windows 3] [--out nbs/10aa_MODEL.json]

Windows of 256 tokens of each kind of text in the shared folder that no predictor was trained on, replayed from an empty
cache, slots shared by all layers: LRU, the forecast learned from the routing (from nothing; and after 32 other texts), the
forecast of the path predictor in the package; all forecasts with LRU as a guard. Medians over windows of loads / loads of MIN.
"""
import argparse
import copy
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from bench_policies import Played, minimum, replay, values_of
from bench_predictor import DOMAINS, windows
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from expertflow.evictor import LRU, ForecastDriven, Guarded, make_evictor
from expertflow.flow import find_checkpoint
from expertflow.forecast import LearnedForecast, PredictedForecast
from expertflow.paths import HORIZONS, load_path, probabilities, record, shipped_path

SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2)
GAMMA = 0.8


def predicted(net, data, i, embedding, L, E):
    "Values after each layer-step of sequence `i`, from probabilities before each token."
    p, f = probabilities(net, data, i, embedding), PredictedForecast([E] * L, HORIZONS, GAMMA)
    out = np.empty((len(p), L, E), np.float32)
    for t, row in enumerate(p.reshape(len(p), -1, L, E)):
        f.update(row)
        out[t] = f.after
    return out


def main():
    ask = argparse.ArgumentParser()
    ask.add_argument("model")
    ask.add_argument("--windows", type=int, default=3)
    ask.add_argument("--out")
    a = ask.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    path = find_checkpoint(a.model)
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    data, other = (record(model, torch.cat([windows(tokenizer, d, part, n) for d in DOMAINS]), 4)
                   for part, n in (("test", a.windows), ("train", 8)))
    texts, others = ([x.ids[i:j].astype(np.int64) for i, j in pairwise(x.offsets)] for x in (data, other))
    L, E = len(data.num_experts), max(data.num_experts)
    net, _ = load_path(shipped_path(path), path)
    embedding = model.get_input_embeddings().weight.detach()
    teacher = LearnedForecast([E] * L, GAMMA)
    for x in others:
        values_of(teacher, x)
    values = {"learned": [values_of(LearnedForecast([E] * L, GAMMA), x) for x in texts],
              "carried": [values_of(copy.deepcopy(teacher), x) for x in texts],
              "path": [predicted(net, data, i, embedding, L, E) for i in range(len(texts))]}
    out = {"model": a.model, "tokens": sum(map(len, texts)), "share": SHARES, "loads": {k: [] for k in ("lru", *values)}}
    for share in SHARES:
        slots = round(E * share) * L
        least = np.array([minimum(x, E, slots, False) for x in texts])

        def median(make, slots=slots, least=least):
            return round(float(np.median([replay(x, E, make(i), slots, False) for i, x in enumerate(texts)] / least)), 4)

        def guarded(v):
            trial = ForecastDriven(np.ones(L * E), L, Played(v, list(range(L)), GAMMA))
            return Guarded(LRU(L * E), trial, L * E)

        out["loads"]["lru"].append(median(lambda i: lambda g: make_evictor("lru", [[1] * E for _ in g])))
        for k, v in values.items():
            out["loads"][k].append(median(lambda i, v=v: lambda g: guarded(v[i])))
        print(f"{share:.3f}", {k: x[-1] for k, x in out["loads"].items()}, flush=True)
    if a.out:
        Path(a.out).write_text(json.dumps(out) + "\n")


if __name__ == "__main__":
    main()
