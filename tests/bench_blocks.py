"""Token blocks of a long prompt: transfers, peak memory and time against block size, run and simulated.

    python tests/bench_blocks.py [--model smollm2-moe] [--tokens 2048] [--out nbs/09c_blocks.json]

A prompt of real text (a novel; shared data) is read with slots for 25 % and 50 % of the experts, all at once down to single
tokens. Each point runs in a process of its own, so that its peak memory is its own. No expert is read twice in one layer and
block: that is asserted for every one. The layer-steps of each run are then replayed by the simulator, whose loads have to be
those of the run. Times are those of a second reading (of the first one below 16 tokens), on a CPU, from the page cache.
`ahead`: behind a paced link, with the next layer's experts prefetched, and without, alternating.
"""
import argparse
import collections
import json
import lzma
import subprocess
import sys
from pathlib import Path

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
SIZES = (1, 4, 16, 32, 64, 256, None)
BUDGETS = ("25%", "50%")
AHEAD, LINK = (64, 256), "400MB/s"
PARTS = ("simulated", "rows", "ahead")


def prompt(tok, n):
    with lzma.open(SHARED / "text/prose/gutenberg18.txt.xz", "rt", encoding="utf-8") as f:
        whole = f.read()
    at = whole.find("\n", 200_000) + 1
    return tok(whole[at : at + 12 * n], verbose=False, return_tensors="pt").input_ids[:, :n]


def point(model, n, budget, size, ahead, link):
    "One run, in this process."
    import numpy as np
    import torch

    from expertflow.blocks import NextLayer
    from expertflow.flow import ExpertFlow
    from expertflow.foresight import record_steps
    from expertflow.hardware import peak_rss
    from expertflow.simulator import simulate
    from expertflow.yardsticks import from_pairs, min_loads

    torch.set_num_threads(1)
    settings = {"gpu_memory_budget": budget, "token_block_size": size, "context": n + 16, "preload": False, "paced_link": link}
    with ExpertFlow.from_pretrained(model, **settings) as flow:
        ids, rt = prompt(flow.tokenizer, n), flow.runtime
        start, reads, count = rt.executor.start, collections.Counter(), rt.cache.count
        ask = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 1, "min_new_tokens": 1}

        def counted(load, urgent=True):
            reads[count.steps, load.layer, load.expert] += 1
            start(load, urgent)

        rt.executor.start = counted
        with record_steps(rt) as steps:
            flow.model.generate(ids, **ask)
        most, loads, nbytes = max(reads.values()), count.loads, rt.traffic.bytes_loaded
        assert most == 1, f"an expert was read {most} times in one layer and block"
        rt.executor.start = start
        if ahead:
            rt.prefetcher = NextLayer(rt.cache.num_experts)
        if size is None or size >= 16:
            flow.model.generate(ids, **ask)  # once more: all kernels are compiled now
        last = flow.generations[-1]
        row = {"budget": budget, "block": size or n, "seconds": last.seconds, "stall": last.stall, "loads": loads,
               "bytes": nbytes, "reads": most, "peak": peak_rss(), "workspace": flow.plan.workspace,
               "planned": flow.ledger.used("device"),
               "slots": rt.cache.n_slots, "second_bytes": last.bytes_loaded, "in_time": count.in_time, "late": count.late,
               "wasted": count.wasted}  # fmt: skip
        load, n = from_pairs(steps, rt.cache.num_experts), rt.cache.n_slots
        s, lru = (simulate(load, n, p, expert_bytes=rt.layouts[0].nbytes, judge=False) for p in ("priority_based", "lru"))
        assert s.loads == loads, f"the run made {loads} loads, its simulation {s.loads}"
        least = int(min_loads(load, n, forced=True).sum())
        return row | {"needed": len(load.experts), "distinct": len(np.unique(load.flat)), "simulated_loads": s.loads,
                      "simulated_bytes": s.bytes_loaded, "lru_loads": lru.loads, "least_loads": least}  # fmt: skip


def simulated(model, n):
    "All sizes, from one recording of the same prompt; the slots of half and a quarter of the experts."
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from expertflow.blocks import block_costs
    from expertflow.flow import find_checkpoint
    from expertflow.paths import record
    from expertflow.simulator import Compute
    from expertflow.trace import Trace

    torch.set_num_threads(1)
    path = find_checkpoint(model)
    data = record(AutoModelForCausalLM.from_pretrained(path).eval(), prompt(AutoTokenizer.from_pretrained(path), n))
    zero = np.zeros(n, np.int32)
    trace = Trace(data.ids.astype(np.uint8), data.weights, zero, zero.astype(np.uint8), zero, zero, tuple(data.num_experts))
    compute = Compute(layer=1e-4, token=2e-6, expert=2e-5)  # an assumed accelerator
    how = {"link": "pcie4x8", "expert_bytes": 10_000_000, "compute": compute}
    costs = {b: block_costs(trace, (1, 4, 16, 32, 64, 256, n), float(b[:-1]) / 100, **how) for b in BUDGETS}
    return [{"budget": b} | c.as_dict() for b, some in costs.items() for c in some]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="smollm2-moe")
    p.add_argument("--tokens", type=int, default=2048)
    p.add_argument("--out", default="nbs/09c_blocks.json")
    p.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="the others stay as the file has them")
    p.add_argument("--point", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.point:
        print("POINT", json.dumps(point(a.model, a.tokens, *json.loads(a.point))))
        return

    def run(*args):
        cmd = [sys.executable, __file__, "--model", a.model, "--tokens", str(a.tokens), "--point", json.dumps(args)]
        out = subprocess.run(cmd, capture_output=True, text=True)
        line = next((x for x in out.stdout.splitlines() if x.startswith("POINT")), None)
        if line is None:
            sys.exit(out.stderr[-2000:])
        print(line, flush=True)
        return json.loads(line[6:])

    result = json.loads(Path(a.out).read_text()) if Path(a.out).exists() else {}
    result |= {"model": a.model, "tokens": a.tokens} | {part: [] for part in a.parts}
    if "simulated" in a.parts:
        result["simulated"] = simulated(a.model, a.tokens)
    for size in reversed(SIZES):
        for budget in BUDGETS if "rows" in a.parts else ():
            result["rows"].append(run(budget, size, False, None))
            Path(a.out).write_text(json.dumps(result, indent=1) + "\n")
        if size in AHEAD and "ahead" in a.parts:
            runs = [run("50%", size, ahead, LINK) for _ in range(2) for ahead in (False, True)]
            result["ahead"].append({"block": size, "link": LINK, "without": runs[::2], "with": runs[1::2]})
            Path(a.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
