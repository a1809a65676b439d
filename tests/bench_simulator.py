"""A run and its replay in virtual time: the same experts and bytes, and how far the simulated stall is from the measured one.

    chrt -f 5 python tests/bench_simulator.py [out.json]

The runtime runs `tiny-moe` on the CPU behind a paced link: a real clock, real bytes, a link slowed down so far that the time of
the machine itself matters little (a real-time priority, `chrt`, keeps it from being late where others work). A sleep before every
attention stands for a slower device. The routing is recorded on the way and replayed by `expertflow.simulator` with the same
slots, policy, preload, prefetcher and link. The time of computing is measured in a run with all experts resident. Each row: what
differs of the experts and bytes counted (nothing may), and the stall, measured and simulated.
"""
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from expertflow.flow import ExpertFlow, find_checkpoint, heat_order, threshold_of
from expertflow.foresight import Degraded
from expertflow.simulator import Compute, Link, simulate
from expertflow.yardsticks import from_pairs

COUNTS = ("hits", "misses", "evictions", "prefetched", "in_time", "late", "wasted", "cancelled")
TEXT = "The old man walked slowly down to the harbour, where the boats lay in the evening sun, and asked the boy for his name."


class Watched:
    "Every layer-step of a model: layer, experts, and when their computing began and ended."

    def __init__(self, flow, sleep=0.0):
        self.calls, self.flow = [], flow
        for name in flow.runtime.store.layers:
            m = flow.model.get_submodule(name)
            m.register_forward_pre_hook(self.begun)
            m.register_forward_hook(lambda m, args, out: self.calls[-1].append(time.perf_counter()))
        for name, m in flow.model.named_modules() if sleep else ():
            if name.endswith("self_attn"):
                m.register_forward_pre_hook(lambda m, args: time.sleep(sleep))

    def begun(self, module, args):
        self.calls.append([module._expertflow[1], args[1].clone(), time.perf_counter()])

    def pairs(self):
        "Layer and experts, in the order in which the runtime takes them."
        return [(layer, i[0].tolist() if len(i) == 1 else sorted(set(i.reshape(-1).tolist()))) for layer, i, *_ in self.calls]

    def steps(self):
        steps = from_pairs(self.pairs(), self.flow.runtime.cache.num_experts)
        steps.tokens = np.array([len(i) for layer, i, *_ in self.calls if layer == 0])
        return steps

    def compute(self):
        "Medians of decoding; a token more in a pass: what the prompt took above them."
        L, tokens = len(self.flow.runtime.store.layers), self.steps().tokens
        begun, ended = (np.array([c[i] for c in self.calls]).reshape(-1, L) for i in (2, 3))
        needed = np.array([len(e) for _, e in self.pairs()]).reshape(-1, L)
        layer = begun[:, 1:] - ended[:, :-1]
        each = np.median(layer[1:], 0)
        rest = max(0.0, float(np.median(begun[2:, 0] - ended[1:-1, -1]) - each.mean()))
        token = max(0.0, float((layer[0] - each).mean()) / max(1, tokens[0] - 1))
        return Compute([each.mean(), *each], token, float(np.median(((ended - begun) / needed)[1:])), rest)


def load(path, budget, **settings):
    # the simulator's forecast is learned from the routing, which is all that a trace has
    settings = {"gpu_memory_budget": budget, "context": 512, "forecast_model_path": "routing"} | settings
    return ExpertFlow.from_pretrained(path, **settings)


@torch.no_grad()
def generate(flow, n_prompt, n_new):
    ids = flow.tokenizer(TEXT, return_tensors="pt").input_ids[:, :n_prompt]
    length = {"min_new_tokens": n_new, "max_new_tokens": n_new}
    return flow.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length)


def like(flow, **more):
    "The settings of a replay of what a model does."
    rt = flow.runtime
    order = heat_order(flow.path, rt.store.num_experts) if flow.config.preload else ()
    link = Link("paced", flow.config.link_rate) if flow.config.link_rate else "instant"
    return {"slots": rt.cache.n_slots, "policy": flow.config.eviction_policy, "expert_bytes": [x.nbytes for x in rt.layouts],
            "preloaded": order, "threshold": threshold_of(flow.config), "warmup_steps": rt.cache.warmup_steps,
            "min_slots": flow.plan.min_slots, "link": link} | more  # fmt: skip


def counts_of(flow):
    "Of the runtime, in the replay's words."
    c, t = flow.runtime.cache.count, flow.runtime.traffic
    return {name: getattr(c, name) for name in COUNTS} | {"bytes": t.bytes_loaded}


def counts_in(r):
    return {name: getattr(r, name) for name in COUNTS} | {"bytes": r.bytes_loaded + r.bytes_preloaded}


def resident(path, sleep, n_prompt, n_new):
    "The layer-steps, and how long computing takes with all experts resident."
    with load(path, "100%") as flow:
        generate(flow, n_prompt, 2)
        watched = Watched(flow, sleep)
        generate(flow, n_prompt, n_new)
        return [(layer, sorted(e)) for layer, e in watched.pairs()], watched.compute()


def row(path, budget, policy, rate, sleep, recall, n_prompt, n_new):
    "One run and its replay. `recall`: of a prefetcher that has seen the run before; None: on demand."
    seen, compute = resident(path, sleep, n_prompt, n_new)
    with load(path, budget, eviction_policy=policy, paced_link=f"{rate}B/s", preload=False) as flow:
        n = list(flow.runtime.cache.num_experts)
        guess = None if recall is None else Degraded(seen, n, recall)
        flow.runtime.prefetcher, watched = guess, Watched(flow, sleep)
        start = time.perf_counter()
        generate(flow, n_prompt, n_new)
        wall = time.perf_counter() - start
        flow.runtime.reap(wait=True)
        again = None if recall is None else Degraded(seen, n, recall)
        r = simulate(watched.steps(), **like(flow, compute=compute, prefetcher=again))
        real, replayed = counts_of(flow), counts_in(r)
        stall = flow.runtime.traffic.stall
    differ = {k: (real[k], replayed[k]) for k in real if real[k] != replayed[k]}
    return {"budget": budget, "policy": policy, "link_MB_per_s": rate / 1e6, "attention_ms": sleep * 1e3, "recall": recall,
            "hit_rate": r.hit_rate, "differ": differ, "stall_measured_s": stall, "stall_simulated_s": r.stall,
            "off": r.stall / stall - 1, "wall_s": wall, "wall_simulated_s": r.seconds}  # fmt: skip


CASES = [  # budget, policy, bytes/s, s of sleep in an attention, recall
    ("50%", "lru", 5_000_000, 0.0, None),
    ("25%", "priority_based", 5_000_000, 0.0, None),
    ("50%", "priority_based", 40_000_000, 0.0, None),
    ("25%", "priority_based", 5_000_000, 0.02, None),
    ("25%", "priority_based", 5_000_000, 0.02, 1.0),
    ("25%", "priority_based", 5_000_000, 0.02, 0.7),
]


def main(out=None, n_prompt=16, n_new=16):
    torch.set_num_threads(1)
    path = find_checkpoint("tiny-moe")
    rows = []
    for case in CASES:
        rows.append(row(path, *case, n_prompt, n_new))
        print(json.dumps(rows[-1]), flush=True)
    worst = max(abs(r["off"]) for r in rows)
    differ = sum(bool(r["differ"]) for r in rows)
    print(f"experts and bytes differ in {differ} of {len(rows)} runs; stall off by {worst:.1%} at most")
    if out:
        Path(out).write_text(json.dumps({"model": "tiny-moe", "link": "paced", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
