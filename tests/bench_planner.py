"""What planned prefetching is worth, and what it costs with a predictor that is no good. All times are simulated, in
ratios to loading on demand.

    python tests/bench_planner.py [--out nbs/08_planner.json] [--keep FOLDER] [--tokens 200]

Two parts. `trained`: the two models in the package write texts (sampled, four prompts), and what their trained
predictors say at every layer-step is recorded beside what was needed; the recording is then replayed over links and
budgets, on demand and planned. `hostile`: recorded decoding of GPT-OSS-20B (shared/data/routing), with predictors that
are certain and wrong: `random` names any four, `opposite` names what is not needed, `turncoat` is right for 100 tokens
and the opposite for the next 100. With the guard, and without it.

A link is given by how long it takes for an expert, in times of what a layer computes; a budget by the share of the
experts that have slots. `--keep`: recordings are kept in this folder, and used again.
"""
import argparse
import json
import os
from pathlib import Path

import numpy as np

from expertflow.planner import Planned
from expertflow.simulator import Compute, Link, simulate
from expertflow.yardsticks import from_pairs

LOADS, SHARES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0), (0.25, 0.5)
PROMPTS = ("Why is the sky blue?", "Write a short story about a lighthouse keeper and his dog.",
           "Explain how to bake bread to a child.", "What is the difference between a list and a tuple in Python?")  # fmt: skip
NBYTES, LAYER = 13_000_000, 1e-3  # of an expert; s


def setting(load, share, policy="lru"):
    "Settings of `simulate`; `load`: of an expert, in times of a layer."
    link = Link(f"{load:g}", NBYTES / (load * LAYER), 1e-5)
    return {"slots": share, "policy": policy, "link": link, "expert_bytes": NBYTES, "judge": False,
            "compute": Compute(layer=LAYER, expert=LAYER / 50)}  # fmt: skip


class Recorded:
    "What a predictor said at each layer-step."

    def __init__(self, need):  # [N, D, E]
        self.need = need
        self.restart()

    def restart(self):
        self.at = -1

    def __call__(self, layer, experts):
        self.at += 1
        return self.need[self.at].astype(np.float32)


class Hostile:
    "Certain of what it says: `random`, `opposite`, or `turncoat`."

    def __init__(self, steps, kind, ahead=3):
        self.steps, self.kind, self.ahead = list(steps), kind, ahead
        self.L, self.E = len(steps.num_experts), max(steps.num_experts)
        self.restart()

    def restart(self):
        self.at, self.rng = -1, np.random.default_rng(0)

    def __call__(self, layer, experts):
        self.at += 1
        out, right = np.zeros((self.ahead, self.E), np.float32), self.at // self.L % 200 < 100
        for d, (to, needed) in enumerate(self.steps[self.at + 1 : self.at + 1 + self.ahead]):
            if to <= layer:
                break
            if self.kind == "random":
                out[d, self.rng.permutation(self.E)[: len(needed)]] = 1
            elif self.kind == "turncoat" and right:
                out[d, needed] = 1
            else:
                out[d] = 1
                out[d, needed] = 0
        return out


def record(name, keep, tokens=150):
    "Layers [N], experts [N, K] and probabilities [N, D, E] of what a model in the package decodes."
    if keep and (file := Path(keep) / f"{name}.npz").exists():
        z = np.load(file)
        return z["layers"], z["ids"], z["need"]
    import torch

    from expertflow.checkpoint import Checkpoint
    from expertflow.flow import ExpertFlow
    from expertflow.foresight import make_predictor, needed, predictor_file
    from expertflow.taps import Watch, find_taps, read_routing

    torch.set_num_threads(1)
    rows = []
    with ExpertFlow.from_pretrained(name, gpu_memory_budget="60%", context=1024) as flow:
        taps = find_taps(flow.model)
        predictor = make_predictor(predictor_file(None, Checkpoint.open(flow.path)), flow, taps, 4)

        def routed(layer, residual, output):
            with torch.no_grad():
                routing = read_routing(output)
                p = predictor(layer, residual, routing)
            if len(residual) == 1:
                rows.append((layer, sorted(routing.ids[0].tolist()), needed(p.float()).numpy().astype(np.float16)))

        watch = Watch(taps, routed)
        for i, prompt in enumerate(PROMPTS):
            torch.manual_seed(i)
            predictor.forget()
            flow.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, temperature=0.8)
        watch.remove()
    layers, ids, need = (np.array(x) for x in zip(*rows, strict=True))
    if keep:
        np.savez_compressed(file, layers=layers, ids=ids, need=need)
    return layers, ids, need


def compare(steps, base, look, settings, **planner):
    "A planned run beside one on demand."
    run = Planned(look, **planner)
    r, p = simulate(steps, prefetcher=run, **settings), run.planner
    return {"time": r.seconds / base.seconds, "by_the_ghost": 1 - p.saved / base.seconds, "window": p.pace.window,
            "lookahead": p.far(4), "prefetched": r.prefetched, "in_time": r.in_time, "late": r.late, "wasted": r.wasted,
            "cancelled": r.cancelled, "bytes": r.bytes_loaded / base.bytes_loaded, "switched": p.guard.switched}  # fmt: skip


def trained(name, keep, tokens):
    layers, ids, need = record(name, keep)
    L, n = int(layers.max()) + 1, tokens * (int(layers.max()) + 1)
    pairs = [(int(layer), row.tolist()) for layer, row in zip(layers[:n], ids[:n], strict=True)]
    steps, rows = from_pairs(pairs, [need.shape[2]] * L), []
    for share in SHARES:
        for load in LOADS:
            s = setting(load, share)
            base = simulate(steps, **s)
            row = {"model": name, "load": load, "share": share, "missing": base.misses / len(steps),
                   "stall": base.stall / base.seconds, "overlap_bound": base.overlap_bound / base.seconds}  # fmt: skip
            rows.append(row | compare(steps, base, Recorded(need), s))
            print(rows[-1], flush=True)
    return rows


def hostile(tokens, policies=("lru", "priority_based", "forecast"), loads=(0.25, 1.0, 4.0)):
    shared = Path(os.environ.get("EXPERTFLOW_SHARED", Path(__file__).parents[2] / "shared"))
    x = np.load(shared / "data/routing/gpt-oss-20b/gpt_oss_20b_decode.npz")["experts"][:tokens]
    steps, rows = from_pairs([(layer, e.tolist()) for row in x for layer, e in enumerate(row)], [32] * x.shape[1]), []
    for policy in policies:
        for share in SHARES:
            for load in loads:
                s = setting(load, share, policy)
                base = simulate(steps, **s)
                for kind in ("random", "opposite", "turncoat"):
                    for guard in (True, False) if policy == "lru" else (True,):
                        row = {"policy": policy, "share": share, "load": load, "kind": kind, "guard": guard,
                               "loads_long": base.seconds / (load * LAYER)}  # fmt: skip
                        how = {} if guard else {"slack": float("inf")}
                        rows.append(row | compare(steps, base, Hostile(steps, kind), s, **how))
                        print(rows[-1], flush=True)
    return rows


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--out")
    a.add_argument("--keep")
    a.add_argument("--tokens", type=int, default=200)
    a = a.parse_args()
    out = {"simulated": True, "tokens": a.tokens, "hostile": hostile(a.tokens),
           "trained": [row for name in ("tiny-moe", "smollm2-moe") for row in trained(name, a.keep, a.tokens)]}  # fmt: skip
    if a.out:
        Path(a.out).write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
