"""What grouping sequences is worth: activated experts of a block, loads, and time; and what no grouping can better.

    python tests/bench_grouping.py [--out nbs/08c_grouping.json] [--parts recorded optimum paced]

recorded  Decoding, replayed from recordings: GPT-OSS-20B writing (shared data), and the bundled models reading texts of eight
          kinds token by token as if they wrote them. Sequences arrive in random order and decode in groups of 16, formed by what
          the first 64 tokens used, as `generate_many` does; for comparison by what the judged tokens will use, and anew for every
          token by the experts that it uses. Loads and time with slots for a quarter of the experts are simulated: group after
          group, the default policy, and a link that is never idle, since nothing but loads takes time.
optimum   All 300 million ways of making two groups of 16 are tried on single steps (a C program).
paced     `generate_many` for real, on the CPU, with a paced link, a quarter of the experts in slots: by routes and in the order
          of arrival, in one run, alternating. The time of decoding, without that of reading the prompts.
"""
import argparse
import ctypes
import json
import lzma
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from expertflow.bundled import ensure
from expertflow.flow import ExpertFlow
from expertflow.grouping import expected, group, in_order
from expertflow.many import answer_all
from expertflow.paths import record
from expertflow.simulator import simulate
from expertflow.trace import import_trace
from expertflow.yardsticks import from_pairs

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
KINDS = {"sums": "math/gsm8k_train", "code": "code/python_stdlib", "Chinese manual": "zh/python_docs_zh",
         "Chinese poems": "zh/tang300", "manual": "docs/python_docs_en", "plays": "prose/tinyshakespeare",
         "novels": "prose/gutenberg18", "speeches": "prose/state_union"}  # fmt: skip
READ, JUDGED = 64, 96  # tokens: of the prompt, and after it
TRIALS = 4


def texts(per_kind, seed=0):
    "Kind and text, from random places."
    rng = np.random.default_rng(seed)
    for kind, name in KINDS.items():
        with lzma.open(SHARED / "text" / f"{name}.txt.xz", "rt", encoding="utf-8") as f:
            whole = f.read()
        for at in rng.integers(0, len(whole) - 4000, per_kind).tolist():
            at = whole.find("\n", at) + 1
            yield kind, whole[at : at + 3000]


def sets_of(ids, E):  # [S, T, L, K] -> bool [S, T, L, E]
    used = np.zeros((*ids.shape[:3], E), bool)
    np.put_along_axis(used, ids.astype(int), True, -1)
    return used


def read_by(name, per_kind):
    "What a bundled model uses for each token of texts that it reads."
    path, n = ensure(name), READ + JUDGED
    tok, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).eval()
    found = [(k, i[:n]) for k, t in texts(per_kind) if len(i := tok(t, verbose=False)["input_ids"]) >= n]
    data = record(model, torch.tensor([i for _, i in found]))
    return [k for k, _ in found], sets_of(data.ids.reshape(len(found), n, *data.ids.shape[1:]), max(data.num_experts))


def written():
    "What GPT-OSS-20B used for each token that it wrote."
    trace = import_trace(SHARED / "routing/gpt-oss-20b/gpt_oss_20b_decode.npz")
    some = [t.ids[: READ + JUDGED] for t in trace.sequences() if len(t) >= READ + JUDGED]
    return None, sets_of(np.stack(some), max(trace.num_experts))


def touched(after, groups):
    "Distinct experts that a block touches in a layer, mean. after: [N, T, L, E]"
    return float(np.mean([after[g].any(0).sum(-1).mean() for g in groups]))


def replayed(after, groups):
    "Simulated seconds and loads: group after group, all of its tokens."
    passes = [token for g in groups for token in after[g].any(0)]
    steps = [(layer, np.flatnonzero(row).tolist()) for token in passes for layer, row in enumerate(token)]
    load = from_pairs(steps, [after.shape[-1]] * after.shape[2])
    r = simulate(load, 0.25, "priority_based", link="pcie4x16", expert_bytes=13_000_000, judge=False)
    return r.seconds, r.loads


def recorded(name, used, pools, rng):
    "Ratios to the order of arrival, mean over trials."
    rows = []
    for where, members, n_groups in pools:
        got = []
        for _ in range(TRIALS):
            pick = rng.permutation(members)[: 16 * n_groups]
            if len(pick) < 16 * n_groups:
                break
            before, after = used[pick, :READ].mean(1), used[pick, READ:]
            arrival, ours = in_order(len(pick), 16), group(before, 16)
            base = touched(after, arrival)
            single = [expected(s, group(s, 16)).mean() / s.shape[1] for s in after[:, ::24].swapaxes(0, 1)]
            one = [expected(s, arrival).mean() / s.shape[1] for s in after[:, ::24].swapaxes(0, 1)]
            (t0, n0), (t1, n1) = replayed(after, arrival), replayed(after, ours)
            got.append([base, touched(after, ours) / base, touched(after, group(after.mean(1), 16)) / base,
                        np.mean(single) / np.mean(one), n1 / n0, t0 / t1])  # fmt: skip
        if got:
            m = np.mean(got, 0).tolist()
            keys = ("arrival", "grouped", "by_the_future", "every_token_known", "loads", "simulated_speed")
            rows.append({"model": name, "sequences": where, "groups": n_groups} | dict(zip(keys, m, strict=True)))
            print(json.dumps(rows[-1]), flush=True)
    return rows


ALL = r"""
#include <stdint.h>
// m[32][L]: experts that each sequence uses in each layer, as bits. The least sum over halves and layers, of all halvings.
int best(const uint32_t *m, int L) {
  static uint32_t half[2][65536][64];
  for (int h = 0; h < 2; h++) for (int s = 0; s < 65536; s++) for (int l = 0; l < L; l++) {
    int low = s ? __builtin_ctz(s) : 0;
    half[h][s][l] = s ? half[h][s & (s - 1)][l] | m[(16 * h + low) * L + l] : 0;
  }
  int least = 1 << 30;
  for (int a = 1; a < 65536; a += 2)  // sequence 0 is in the first half
    for (int b = 0; b < 65536; b++) if (__builtin_popcount(a) + __builtin_popcount(b) == 16) {
      int n = 0;
      for (int l = 0; l < L; l++) {
        n += __builtin_popcount(half[0][a][l] | half[1][b][l]);
        n += __builtin_popcount(half[0][65535 ^ a][l] | half[1][65535 ^ b][l]);
      }
      if (n < least) least = n;
    }
  return least;
}
"""


def optimum(name, used, rng, steps):
    "The best of all groupings of single steps of 32 sequences, whose experts are known; and ours."
    rows = []
    with tempfile.TemporaryDirectory() as tmp:
        source, lib = Path(tmp, "all.c"), Path(tmp, "all.so")
        source.write_text(ALL)
        subprocess.run(["gcc", "-O3", "-march=native", "-shared", "-fPIC", source, "-o", lib], check=True)
        best = ctypes.CDLL(str(lib)).best
        for _ in range(steps):
            sets = used[rng.permutation(len(used))[:32], int(rng.integers(READ, READ + JUDGED))]
            bits = np.ascontiguousarray((sets.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(-1, dtype=np.uint32))
            least = best(bits.ctypes.data_as(ctypes.c_void_p), bits.shape[1])
            arrival, ours = (float(expected(sets, g).sum()) for g in (in_order(32, 16), group(sets, 16)))
            rows.append({"model": name, "arrival": arrival, "grouped": ours, "optimum": least})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def paced(name, per_kind, block, rate, rounds, new=8):
    "Seconds and bytes of decoding in groups, by routes to by arrival."
    with ExpertFlow.from_pretrained(name, gpu_memory_budget="25%", paced_link=rate) as flow:
        ids = [flow.tokenizer(t, verbose=False, return_tensors="pt").input_ids[0, :READ] for _, t in texts(per_kind)]
        ids = [ids[i] for i in np.random.default_rng(1).permutation(len(ids))]
        ratios = []
        for i in range(rounds + 1):
            cost = {}
            for by in ("arrival", "routes"):
                begin = len(flow.generations)
                answers = dict(answer_all(flow.model, ids, block, new, by=by, do_sample=False, min_new_tokens=new))
                assert len(answers) == len(ids)
                runs = [g for g in flow.generations[begin:] if g.new_tokens > 1]
                cost[by] = [sum(getattr(g, k) for g in runs) for k in ("seconds", "bytes_loaded", "stall")]
            if i == 0:  # kernels are compiled
                continue
            ratios.append([cost["arrival"][0] / cost["routes"][0], cost["routes"][1] / cost["arrival"][1],
                           cost["arrival"][2] / cost["arrival"][0]])  # fmt: skip
            print(name, block, ratios[-1], flush=True)
    speed, nbytes, stalled = np.median(ratios, 0).tolist()
    how = {"model": name, "sequences": len(ids), "block": block, "link": rate}
    return how | {"speed": speed, "bytes": nbytes, "stalled": stalled}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", default="nbs/08c_grouping.json")
    p.add_argument("--parts", nargs="+", default=["recorded", "optimum", "paced"])
    a = p.parse_args()
    torch.set_num_threads(1)
    out, rng = Path(a.out), np.random.default_rng(0)
    result = json.loads(out.read_text()) if out.exists() else {}
    loads = {"gpt-oss-20b": written} | {n: lambda n=n, k=k: read_by(n, k) for n, k in (("tiny-moe", 18), ("smollm2-moe", 9))}
    for name, make in loads.items() if {"recorded", "optimum"} & set(a.parts) else ():
        kinds, used = make()
        every = np.arange(len(used))
        pools = [("mixed", every, n) for n in (2, 4, 8)]
        if kinds:
            alike = np.flatnonzero([k in ("plays", "novels", "speeches") for k in kinds])
            pools.append(("prose only", alike, 2))
        if "recorded" in a.parts:
            result.setdefault("recorded", {})[name] = recorded(name, used, pools, rng)
        if "optimum" in a.parts and name != "smollm2-moe":
            result.setdefault("optimum", {})[name] = optimum(name, used, rng, 3)
        out.write_text(json.dumps(result, indent=1) + "\n")
    if "paced" in a.parts:
        result["paced"] = []
        for per_kind, block in ((4, 16), (4, 4)):
            result["paced"].append(paced("tiny-moe", per_kind, block, "10MB/s", 2))
            out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
