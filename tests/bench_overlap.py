"""How much of the loading is hidden behind computing: on demand against prefetching, on the simulated accelerator.

    python tests/bench_overlap.py [out.json]

All of it is simulated: an accelerator that takes a given time for the attention of every layer, and a link of a given rate
(`simdev`). Real are the mover, the runtime and the cache. A small model in the shape of OLMoE (64 experts, 8 of them a token)
decodes given tokens with 30 % of its experts in slots; about half of the experts that a layer-step needs are then missing. The
prefetcher replays the routing of an earlier run, one or two layers ahead: a perfect prediction.

Stall: the time of a run less that of the same run with all experts resident, by the same path (one wait for the router a layer).
Load: bytes that the run on demand loaded for a layer-step, over the rate of the link.
Bound: the sum over layer-steps of max(0, load - compute); compute is the time from router to router with all experts resident,
and 0 for the first layer-step. A prefetch that begins when the layer before has chosen its experts cannot stall less.
Hidden: of the stall on demand less the bound, the part that is gone with prefetching. Two layers ahead it may be more than one,
since a small load leaves room for a large one after it.

Other programs only ever make a run slower, so each figure is from the quickest of some rounds.
"""
import inspect
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import simdev
import torch
from transformers import DynamicCache

from expertflow.flow import ExpertFlow
from expertflow.testing import write_checkpoint

SHAPE = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 128, "num_experts": 64, "num_experts_per_tok": 8,
         "num_attention_heads": 8, "num_key_value_heads": 8}  # fmt: skip
RATIOS = (0.5, 1.0, 2.0)  # mean load of a layer-step over the time of the attention of a layer


@dataclass
class Run:
    "One decode of all tokens."
    ahead: int | None  # layers that the prefetcher looks ahead, 0: none; None: all experts resident
    wall: float = 0.0  # s
    hits: int = 0
    misses: int = 0
    in_time: int = 0  # prefetched experts that were there when they were needed
    late: int = 0
    wasted: int = 0
    cancelled: int = 0  # called off before anything was in their slots
    demand: int = 0  # loads that began when they were needed
    prefetched: int = 0
    pageable: int = 0  # copies to the device from memory that is not pinned
    syncs_per_token: float = 0.0
    loads: list[int] = field(default_factory=list)  # bytes loaded for each layer-step
    compute: list[float] = field(default_factory=list)  # s from router to router
    logits: torch.Tensor | None = None


class Replay:
    "A prefetcher that knows what comes: `seen` are the experts of every layer-step, in order."

    def __init__(self, seen, ahead):
        self.seen, self.ahead, self.at = seen, ahead, -1

    def __call__(self, layer, experts):
        self.at = next(i for i in range(self.at + 1, len(self.seen)) if self.seen[i][0] == layer)
        assert self.seen[self.at][1] == sorted(experts), "the routing is not the one recorded"
        yield from self.seen[self.at + 1 : self.at + 1 + self.ahead]


def load(path, budget):
    "The model; chunks of a prefetch are to its experts as 4 MiB are to those of OLMoE."
    settings = {"cpu_memory_budget": "100%", "context": 256, "system_reserve": "1MB", "gpu_memory_budget": budget}
    flow = ExpertFlow.from_pretrained(path, model_kwargs={"attn_implementation": "eager"}, **settings)
    flow.runtime.executor.chunk_bytes = flow.runtime.layouts[0].nbytes // 3 + 1
    return flow


@torch.no_grad()
def decode(flow, tokens):
    "Logits of each token after those before it; the tokens are given, so that all runs are the same."
    new = "cache" in inspect.signature(flow.model.forward).parameters  # its name depends on the version of transformers
    kwargs = {"cache" if new else "past_key_values": DynamicCache(), "use_cache": True}
    out = [flow.model(x.view(1, 1), **kwargs).logits for x in tokens.unbind()]
    torch.accelerator.synchronize()
    return torch.cat(out).cpu()


def record(flow, tokens):
    "Layer and experts of each layer-step."
    experts = [flow.model.get_submodule(name) for name in flow.runtime.store.layers]
    seen = []
    hooks = [m.register_forward_pre_hook(lambda m, args: seen.append((m._expertflow[1], args[1].clone()))) for m in experts]
    decode(flow, tokens)
    for hook in hooks:
        hook.remove()
    return [(layer, sorted(index.cpu().reshape(-1).tolist())) for layer, index in seen]


def measure(flow, tokens, ahead, seen=(), guess=None, **device):
    "One run; `guess`: a prefetcher, instead of a replay of `seen`; `device`: settings of the simulated device."
    rt, run = flow.runtime, Run(ahead)
    layers, steps = len(rt.layouts), len(tokens) * len(rt.layouts)
    rt.prefetcher = Replay(seen, ahead) if ahead else guess
    run.loads = [0] * steps
    start, begin, at = rt.executor.start, rt.cache.begin, [-1]

    def noted(layer, experts):
        at[0] += 1
        assert at[0] % layers == layer
        return begin(layer, experts)

    def starting(load, urgent=True):
        step = at[0] + (load.layer - at[0]) % layers
        run.loads[step] += rt.layouts[load.layer].nbytes
        start(load, urgent)

    count, moved = asdict(rt.cache.count), asdict(rt.executor.moved)
    if ahead is not None:
        rt.executor.start, rt.cache.begin = starting, noted
    simdev.reset()
    simdev.configure(**device)
    t = time.perf_counter()
    run.logits = decode(flow, tokens)
    run.wall = time.perf_counter() - t
    rt.executor.start, rt.cache.begin, rt.prefetcher = start, begin, None
    rt.note(wait=True)
    for name in ("hits", "misses", "in_time", "late", "wasted", "cancelled", "prefetched"):
        setattr(run, name, getattr(rt.cache.count, name) - count[name])
    run.demand = rt.executor.moved.demand - moved["demand"]
    run.pageable = simdev.counters()["copies.h2d.pageable"]
    run.syncs_per_token = simdev.counters()["syncs"] / len(tokens)
    ends = [s.end for s in simdev.trace() if s.name == "aten::topk"]
    run.compute = [0.0, *(b - a for a, b in pairwise(ends))]
    return run


def rounds(path, tokens, compute, ratio, n=1, aheads=(1, 2)):
    "The quickest of `n` runs of each kind (None: resident, 0: on demand, else layers ahead); the link's rate in bytes/s."
    tokens = tokens.to("sim")
    with load(path, "100%") as whole, load(path, "30%") as some:
        whole.runtime.table = lambda layer: None  # not by the path that needs no wait for the router
        decode(whole, tokens)
        seen = record(some, tokens)
        some.runtime.note(wait=True)
        needed = [measure(some, tokens, 0).loads for _ in range(2)][-1]
        link = sum(needed) / len(needed) / (ratio * compute)
        device = {"link": link, "op_time": {"aten::_softmax": compute / 2}}  # two of them: attention, and the router after it
        best = {}
        for _ in range(n):
            for ahead in (None, 0, *aheads):
                run = measure(some if ahead is not None else whole, tokens, ahead, seen, **device)
                assert ahead not in best or torch.equal(run.logits, best[ahead].logits)
                best[ahead] = min(run, best.get(ahead, run), key=lambda r: r.wall)
    assert not simdev.hazards()
    return best, link


def row(best, link, ratio):
    "The figures of one ratio; times in ms per layer-step."
    resident, on_demand = best[None], best[0]
    ms = 1e3 / len(on_demand.loads)
    bound = sum(max(0.0, n / link - c) for n, c in zip(on_demand.loads, resident.compute)) * ms
    stall = {a: (best[a].wall - resident.wall) * ms for a in best if a is not None}
    out = {"simulated": True, "load_to_compute": ratio, "link_MB_per_s": link / 1e6, "resident_ms": resident.wall * ms,
           "load_ms": sum(on_demand.loads) / link * ms, "bound_ms": bound, "stall_on_demand_ms": stall[0],
           "missing": on_demand.misses / (on_demand.hits + on_demand.misses)}  # fmt: skip
    for a in [a for a in stall if a]:
        r = best[a]
        out[f"ahead_{a}"] = {
            "stall_ms": stall[a], "hidden": (stall[0] - stall[a]) / (stall[0] - bound), "load_ms": sum(r.loads) / link * ms,
            "in_time": r.in_time, "late": r.late, "wasted": r.wasted, "cancelled": r.cancelled, "on_demand": r.demand,
        }  # fmt: skip
    out |= {"pageable_copies": sum(r.pageable for r in best.values()), "syncs_per_token": on_demand.syncs_per_token,
            "equal": all(torch.equal(r.logits, resident.logits) for r in best.values())}  # fmt: skip
    return out


def table(rows):
    "Markdown."
    head = ["load : compute", "resident, ms", "load, ms", "bound, ms", "stall on demand, ms", "1 ahead, ms", "2 ahead, ms",
            "hidden 1 ahead", "hidden 2 ahead"]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        cells = [f"{r['load_to_compute']:g} : 1", *(f"{r[k]:.1f}" for k in ("resident_ms", "load_ms", "bound_ms"))]
        cells += [f"{r['stall_on_demand_ms']:.1f}", *(f"{r[a]['stall_ms']:.1f}" for a in ("ahead_1", "ahead_2"))]
        cells += [f"{r[a]['hidden']:.0%}" for a in ("ahead_1", "ahead_2")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def some_tokens(n):
    return torch.randint(3, 320, (n,), generator=torch.Generator().manual_seed(0))


def main(out=None, compute=0.04, n_tokens=12, n_rounds=3):
    ok, why = simdev.available()
    if not ok:
        sys.exit(why)
    torch.set_num_threads(1)
    simdev.reset()
    with tempfile.TemporaryDirectory() as tmp:
        path = write_checkpoint("olmoe", Path(tmp) / "model", dtype="bfloat16", **SHAPE)
        rows = [row(*rounds(path, some_tokens(n_tokens), compute, x, n_rounds), x) for x in RATIOS]
    print("Simulated accelerator and link; times per layer-step.\n\n" + table(rows) + "\n")
    result = {"simulated": True, "attention_ms": compute * 1e3, "tokens": n_tokens, "layers": SHAPE["num_hidden_layers"],
              "rounds": n_rounds, "rows": rows}  # fmt: skip
    print(json.dumps(result))
    if out:
        Path(out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
