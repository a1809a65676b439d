"""Every eviction policy on recorded decoding: loads against MIN and LRU, per sequence from an empty cache.

    python tests/bench_policies.py [--every 8] [--out nbs/06_evictor.json]

Judged on every n-th sequence. "forecast" begins each of them knowing nothing, "forecast_carried" knows what it learned from
`--learn` other sequences, and goes on learning; both are guarded by LRU. `*_alone` is the same without the
guard. Slots are shared by all layers, or each layer has its own (not with E/8 = top-k: then a layer has no choice).
A layer-step is atomic. Written after each policy; what the file has already is not done again.
"""
import argparse
import copy
import json
import time
from pathlib import Path

import numpy as np

from expertflow.evictor import LRU, POLICIES, ForecastDriven, Guarded, make_evictor
from expertflow.forecast import LearnedForecast
from expertflow.trace import import_trace
from expertflow.yardsticks import from_pairs, min_loads

CELLS = [("shared", "E/8"), ("shared", "E/4"), ("shared", "3E/8"), ("per_layer", "E/4"), ("per_layer", "3E/8")]
PARTS = {"E/8": 8, "E/4": 4, "3E/8": 8 / 3}


def replay(x: np.ndarray, E: int, make, slots: int, per_layer: bool) -> int:  # x [T, L, K]
    "Loads of a sequence; `make(layers)` gives an evictor for these layers. Calls it as `ExpertCache` does."
    L, loads = x.shape[1], 0
    groups = [[layer] for layer in range(L)] if per_layer else [list(range(L))]
    evictors = [make(g) for g in groups]
    tell = [getattr(e, "moved", None) for e in evictors]
    inside, left, now = np.zeros((len(groups), (1 if per_layer else L) * E), bool), [slots] * len(groups), [0] * len(groups)
    for row in x:
        for layer, e in enumerate(row):
            g, ids = (layer, e) if per_layer else (0, e + layer * E)
            now[g] += 1
            evictors[g].observe(now[g], ids)
            here = inside[g]
            new = ids[~here[ids]]
            if not len(new): continue
            loads += len(new)
            out = len(new) - left[g]
            left[g] = max(0, -out)
            if out > 0:
                here[ids] = False       # the step's own are pinned
                ready = np.flatnonzero(here)
                here[ids] = True
                gone = ready[evictors[g].score(now[g], ready).argsort(kind="stable")[:out]]
                here[gone] = False
                if tell[g]:
                    for i in gone: tell[g](int(i), False)
            here[new] = True
            if tell[g]:
                for i in new: tell[g](int(i), True)
    return loads


class Played:
    "A forecast that has been made before: values after each layer-step."

    def __init__(self, values: np.ndarray, layers: list[int], gamma: float):  # [T, L, E]
        self.gamma, self.values, self.layers, self.t = gamma, values, layers, [0] * len(layers)
        self.value = np.full((len(layers), values.shape[2]), 0.01, np.float32)

    def observe(self, layer: int, experts: np.ndarray) -> None:
        self.value[layer] = self.values[self.t[layer], self.layers[layer]]
        self.t[layer] += 1


def values_of(f: LearnedForecast, x: np.ndarray) -> np.ndarray:
    f.forget()
    out = np.empty((*x.shape[:2], f.value.shape[1]), np.float32)
    for t, row in enumerate(x):
        for layer, e in enumerate(row):
            f.observe(layer, e)
            out[t, layer] = f.value[layer]
    return out


def minimum(x: np.ndarray, E: int, slots: int, per_layer: bool, **how) -> int:
    "MIN for sets, with bypass unless `forced`."
    L = x.shape[1]
    if not per_layer:
        return int(min_loads(from_pairs([(layer, e) for row in x for layer, e in enumerate(row)], [E] * L), slots, **how).sum())
    return sum(int(min_loads(from_pairs([(0, row[layer]) for row in x], [E]), slots, **how).sum()) for layer in range(L))


def slots_of(org: str, share: str, L: int, E: int) -> int:
    per = round(E / PARTS[share])
    return per if org == "per_layer" else per * L


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--trace", default="../shared/data/routing/gpt-oss-20b/gpt_oss_20b_decode.npz")
    p.add_argument("--every", type=int, default=8)
    p.add_argument("--learn", type=int, default=100)
    p.add_argument("--out", default="nbs/06_evictor.json")
    a = p.parse_args()
    trace = import_trace(a.trace)
    texts = [t.ids.astype(np.int64) for t in trace.sequences()]
    L, E = trace.n_layers, max(trace.num_experts)
    test, train = texts[:: a.every], [x for i, x in enumerate(texts) if i % a.every][:: 3][: a.learn]
    start = time.process_time()
    teacher = LearnedForecast([E] * L)
    for x in train:
        teacher.forget()
        for row in x:
            for layer, e in enumerate(row): teacher.observe(layer, e)
    seconds = time.process_time() - start
    result = {"trace": Path(a.trace).name, "every": a.every, "sequences": len(test), "tokens": sum(map(len, test)),
              "layers": L, "experts": E,
              "learned_from": {"sequences": len(train), "tokens": sum(map(len, train)),
                               "us_per_layer_step": round(1e6 * seconds / sum(map(len, train)) / L, 1)},
              "needed": [int(x.size) for x in test], "loads": {}}
    if Path(a.out).exists(): result["loads"] = json.loads(Path(a.out).read_text())["loads"]

    def note(name: str, loads) -> None:     # loads(text, E, slots, per_layer)
        if name in result["loads"]: return
        start = time.process_time()
        result["loads"][name] = {f"{org} {s}": [loads(i, slots_of(org, s, L, E), org == "per_layer") for i in range(len(test))]
                                 for org, s in CELLS}
        Path(a.out).write_text(json.dumps(result) + "\n")
        print(name, f"{time.process_time() - start:.0f} s", flush=True)

    def plain(name: str):
        return lambda i, slots, per: replay(test[i], E, lambda g: make_evictor(name, [[1] * E for _ in g]), slots, per)

    def played(all_values: list[np.ndarray], guard: bool):
        def make(i):
            def one(g):
                n = len(g) * E
                trial = ForecastDriven(np.ones(n), len(g), Played(all_values[i], g, teacher.gamma))
                return Guarded(LRU(n), trial, n) if guard else trial
            return one
        return lambda i, slots, per: replay(test[i], E, make(i), slots, per)

    note("min", lambda i, slots, per: minimum(test[i], E, slots, per))
    note("lru", plain("lru"))
    carried = [values_of(copy.deepcopy(teacher), x) for x in test]
    note("forecast_carried_alone", played(carried, False))
    for name in ("decayed_frequency", "priority_based", "lfu"): note(name, plain(name))
    cold = [values_of(LearnedForecast([E] * L), x) for x in test]
    note("forecast_alone", played(cold, False))
    note("forecast_carried", played(carried, True))
    note("forecast", played(cold, True))
    for w in (1, 2, 4, 8): note(f"min_window_{w}", lambda i, slots, per, w=w: minimum(test[i], E, slots, per, window=w))
    note("min_forced", lambda i, slots, per: minimum(test[i], E, slots, per, forced=True))
    for name in POLICIES:
        if name not in ("lru", "forecast"): note(name, plain(name))


if __name__ == "__main__":
    main()
