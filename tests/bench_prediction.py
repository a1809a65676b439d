"""What a prediction is worth: time per token against how often the prediction is right, on the simulated accelerator.

    python tests/bench_prediction.py [out.json]

The accelerator and its link are simulated (`simdev`); the model (`tiny-moe`, in the package), its routing, the cache,
the mover and the runtime are real. A quarter of the experts fit. The model reads a text token by token, as it would
write it. First on demand; then a replay of that run names the experts of the next layer, spoilt so that only 50 to 100
% of them are right (`foresight.Degraded`); then predictors that know nothing but the stream. One layer ahead, for links
on which a layer's missing experts take half as long as its attention, as long, and twice as long. Each figure is from
the quickest of some rounds, in rotating order.
"""
import json
import sys
from pathlib import Path

import simdev
import torch
from bench_overlap import decode, load, measure, record

from expertflow.checkpoint import Checkpoint
from expertflow.flow import find_checkpoint
from expertflow.foresight import Degraded, Foresight, make_predictor, predictor_file
from expertflow.taps import find_taps

TEXT = "The old man walked slowly down to the harbour, where the boats lay in the evening sun, and asked the boy for his name."
RATIOS = (0.5, 1.0, 2.0)  # mean load of a layer-step on demand over the time of a layer's attention
RECALLS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def curve(some, whole, tokens, seen, predictors, ratio, compute, rounds):
    "Seconds per token with all experts resident, on demand, for each recall, and for each predictor; and what they prefetched."
    some.runtime.note(wait=True)
    needed = [measure(some, tokens, 0).loads for _ in range(2)][-1]
    link = sum(needed) / len(needed) / (ratio * compute)
    device = {"link": link, "op_time": {"aten::_softmax": compute / 2}}
    n = list(some.runtime.cache.num_experts)
    ways = {"resident": None, "on demand": None} | {f"{r:.0%} right": r for r in RECALLS} | predictors
    best, order = {}, list(ways)
    for i in range(rounds):
        for name in order[i % len(order):] + order[: i % len(order)]:
            way, flow = ways[name], whole if name == "resident" else some
            eyes = Foresight(flow.runtime, way[0].taps, way[0], 1, ratio=way[1]) if isinstance(way, tuple) else None
            guess = eyes or (Degraded(seen, n, way, seed=i) if way is not None else None)
            run = measure(flow, tokens, None if name == "resident" else 0, guess=guess, **device)
            if eyes:
                run.tally = eyes.tally.as_dict()
                eyes.close()
            assert not best or torch.equal(run.logits, next(iter(best.values())).logits)
            best[name] = min(run, best.get(name, run), key=lambda r: r.wall)
    assert not simdev.hazards()
    base = best["on demand"].wall
    rows = {}
    for name, r in best.items():
        rows[name] = {"ms_per_token": r.wall * 1e3 / len(tokens), "to_on_demand": r.wall / base, "prefetched": r.prefetched,
                      "in_time": r.in_time, "late": r.late, "wasted": r.wasted}  # fmt: skip
        if hasattr(r, "tally"):
            rows[name] |= {"recall": r.tally["recall"][0], "precision": r.tally["precision"][0]}
    missing = best["on demand"].misses / (best["on demand"].hits + best["on demand"].misses)
    return {"load_to_compute": ratio, "link_MB_per_s": link / 1e6, "missing_on_demand": missing, "ways": rows}


def predictors_for(flow):
    "Name -> predictor and what a miss counts in loads in vain: the routers alone, and the one in the package, if there is one."
    taps, ckpt = find_taps(flow.model), Checkpoint.open(flow.path)
    ways = {"gate look-ahead": make_predictor(None, flow, taps, 1)}
    if file := predictor_file(None, ckpt):
        ways["trained"] = make_predictor(file, flow, taps, 1)
    return {f"{name}, a miss counts {ratio:g}": (p, ratio) for name, p in ways.items() for ratio in (1.0, 4.0)}


def main(out=None, compute=0.02, rounds=2, ratios=RATIOS, n_tokens=16):
    ok, why = simdev.available()
    if not ok:
        sys.exit(why)
    torch.set_num_threads(1)
    simdev.reset()
    path = find_checkpoint("tiny-moe")
    with load(path, "100%") as whole, load(path, "25%") as some:
        tokens = some.tokenizer(TEXT, return_tensors="pt").input_ids[0, :n_tokens].to("sim")
        whole.runtime.table = lambda layer: None  # not by the path that needs no wait for the router
        decode(whole, tokens)
        seen = record(some, tokens)
        rows = [curve(some, whole, tokens, seen, predictors_for(some), x, compute, rounds) for x in ratios]
    result = {"simulated": True, "attention_ms": compute * 1e3, "tokens": len(tokens), "model": "tiny-moe", "budget": "25%",
              "rounds": rounds, "rows": rows}  # fmt: skip
    print(json.dumps(result, indent=1))
    if out:
        Path(out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
