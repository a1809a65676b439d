"""What predicting the next layers costs in decoding, as a share of the step without it.

    python tests/bench_predictor_time.py [--out FILE]

Each figure is a median over decode steps of one process and one thread, one sequence, model resident in memory. The last
model has the shapes of OLMoE-1B-7B (four of its layers, 3.5 GB in bfloat16) and random weights: how long an operation takes does
not depend on them, how right a prediction is would.
"""
import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, OlmoeConfig
from transformers.utils import logging

from expertflow.flow import find_checkpoint
from expertflow.predictor import Correction, LayerAhead, load_predictor, time_share
from expertflow.taps import find_taps

PROMPT = torch.arange(100, 132)[None]


def bundled(name):
    model = AutoModelForCausalLM.from_pretrained(find_checkpoint(name), dtype="auto").eval()
    taps = find_taps(model)
    return model, {"gate look-ahead": LayerAhead(taps, shared=False), "in the package": load_predictor(None, model, taps)}


def olmoe(layers=4, rank=64):
    torch.manual_seed(0)
    config = OlmoeConfig(num_hidden_layers=layers)
    torch.set_default_dtype(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.set_default_dtype(torch.float32)
    taps = find_taps(model)
    gate, trained = LayerAhead(taps, shared=False), LayerAhead(taps)
    wide = config.hidden_size + trained.E + 1
    for i in range(layers - 1):
        up = torch.randn(len(trained.targets(i)) * trained.E, rank)
        trained.corrections[i] = Correction(torch.randn(rank, wide), up)
    return model, {"gate look-ahead": gate, f"corrections of rank {rank}": trained}


def main():
    ask = argparse.ArgumentParser()
    ask.add_argument("--out")
    a = ask.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    out = {}
    for name, steps in {"tiny-moe": 96, "smollm2-moe": 48, "OLMoE shape": 16}.items():
        model, predictors = olmoe() if name == "OLMoE shape" else bundled(name)
        out[name] = {who: time_share(model, p, PROMPT, steps) for who, p in predictors.items()}
        print(name, json.dumps(out[name]), flush=True)
        del model, predictors
    if a.out:
        Path(a.out).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
