"What tolerance costs and saves: python tests/bench_tolerance.py > nbs/10d_tolerance.json (half an hour; needs the shared data)."

import json
import lzma
import os
import sys
from pathlib import Path

import torch
from transformers.utils import logging

from expertflow.flow import ExpertFlow
from expertflow.tolerance import against, read

SHARED = Path(os.environ.get("EXPERTFLOW_SHARED") or Path(__file__).resolve().parents[2] / "shared")
TEXTS = ("prose/state_union.txt.xz", "code/python_stdlib.txt.xz", "math/gsm8k_train.txt.xz")
AT = 200_000  # where in each text, in characters
TOKENS = {"tiny-moe": 150, "smollm2-moe": 50}  # of each
GRID = {"tiny-moe": (("50%", (0.05, 0.1, 0.15, 0.2, 0.3)), ("25%", (0.1, 0.2))),
        "smollm2-moe": (("50%", (0.1, 0.12, 0.13, 0.15)),)}


def texts(flow, tokens):
    found = []
    for name in TEXTS:
        with lzma.open(SHARED / "data/text" / name, "rt", encoding="utf-8") as f:
            text = f.read(AT + 20 * tokens)[AT:]
        found.append(flow.tokenizer(text, return_tensors="pt")["input_ids"][0, :tokens])
    return found


def main(models=("tiny-moe", "smollm2-moe")):
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    rows = []
    for model, (budget, tolerances) in ((m, g) for m in models for g in GRID[m]):
        with ExpertFlow.from_pretrained(model, gpu_memory_budget=budget) as flow:
            ids = texts(flow, TOKENS[model])
            read(flow, ids)
            strict = read(flow, ids)
            about = {"model": model, "budget": budget, "tokens": len(strict.loss)}
            rows.append(about | {"tolerance": 0.0, "rescale": False} | against(strict, strict))
            for x in tolerances:
                for rescale in (False, True):
                    flow.runtime.rescale = rescale
                    flow.set(strict=False, tolerance=x)
                    rows.append(about | {"tolerance": x, "rescale": rescale} | against(strict, read(flow, ids)))
                    print(rows[-1], file=sys.stderr, flush=True)
    print("[" + ",\n".join(map(json.dumps, rows)) + "]")


if __name__ == "__main__":
    main(sys.argv[1:] or ("tiny-moe", "smollm2-moe"))
