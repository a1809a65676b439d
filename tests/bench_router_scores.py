"""What the scores of experts that were not chosen are worth to an evictor: tiny-moe, from an empty cache per sequence.

    python tests/bench_router_scores.py [--out nbs/06_router_scores.json]

The model writes `--sequences` texts, is run over each once more, and the probabilities of all its routers are recorded.
"""
import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from bench_policies import minimum, replay, slots_of
from transformers import AutoModelForCausalLM

from expertflow.bundled import ensure
from expertflow.evictor import RouterScore, make_evictor
from expertflow.taps import Watch, find_taps, read_routing

class Scored(RouterScore):
    "Is told the scores of each layer-step as it comes."

    def __init__(self, scores: np.ndarray, layers: list[int], half_life: float):  # [T, L, E]
        super().__init__(np.ones(len(layers) * scores.shape[2]), len(layers), half_life)
        self.all, self.layers, self.t = scores, layers, [0] * len(layers)

    def observe(self, now: int, ids: np.ndarray) -> None:
        own = int(ids[0]) // self.E
        self.scored(own, self.all[self.t[own], self.layers[own]])
        self.t[own] += 1


def probabilities(x: torch.Tensor) -> torch.Tensor:
    "Of logits; some families' routers give probabilities already."
    return x if (x >= 0).all() and (x.sum(-1) - 1).abs().max() < 1e-3 else x.softmax(-1)


@torch.no_grad()
def record(n: int, length: int) -> list[tuple[np.ndarray, np.ndarray]]:  # ids [T, L, K], scores [T, L, E]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(ensure("tiny-moe"), dtype=torch.float32).eval()
    start = torch.randint(1, model.config.vocab_size, (n, 4))
    more = {"min_new_tokens": length, "max_new_tokens": length, "do_sample": True}
    text = model.generate(start, attention_mask=torch.ones_like(start), **more)
    taps, out = find_taps(model), []
    for row in text:
        ids, scores = {}, {}

        def note(layer: int, _, output, ids=ids, scores=scores) -> None:
            got = read_routing(output)
            ids[layer], scores[layer] = got.ids.numpy(), probabilities(got.logits.float()).numpy()

        with Watch(taps, note): model(input_ids=row[None], use_cache=False)
        out.append(tuple(np.stack([d[layer] for layer in range(len(taps))], 1) for d in (ids, scores)))
    return out


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--sequences", type=int, default=12)
    p.add_argument("--length", type=int, default=252)
    p.add_argument("--out", default="nbs/06_router_scores.json")
    a = p.parse_args()
    data = record(a.sequences, a.length)
    L, E = data[0][1].shape[1:]
    policies: dict[str, Callable] = {n: lambda s, g, n=n: make_evictor(n, [[1] * E for _ in g])
                                     for n in ("lru", "lfu", "decayed_frequency", "forecast")}
    policies |= {f"router_score, half-life {h:g}": lambda s, g, h=h: Scored(s, g, h) for h in (2.0, 8.0, 32.0)}
    result = {"model": "tiny-moe", "sequences": len(data), "tokens": sum(len(x) for x, _ in data), "layers": L, "experts": E,
              "top_k": int(data[0][0].shape[2]), "loads": {}}
    for org, share in [("shared", "E/4"), ("shared", "3E/8"), ("per_layer", "E/4"), ("per_layer", "3E/8")]:
        n, per = slots_of(org, share, L, E), org == "per_layer"
        cell = {"min": [minimum(x, E, n, per) for x, _ in data]}
        for name, make in policies.items():
            cell[name] = [replay(x.astype(np.int64), E, lambda g, make=make, s=s: make(s, g), n, per) for x, s in data]
        result["loads"][f"{org} {share}"] = cell
        ratio = {k: round(float(np.median(np.array(v) / cell["min"])), 3) for k, v in cell.items()}
        print(org, share, ratio, flush=True)
    Path(a.out).write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
