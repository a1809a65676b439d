"""How many pictures of the live map a real browser paints, and what they cost the kernel:

    python tests/bench_map.py [--layers 48 --experts 128 --rate 16]

A notebook in JupyterLab shows a board whose events are all new with each picture; the browser counts what it has painted. The
processor time is that of the whole kernel process, in spells with the map less that in spells while it pauses, in turn; medians.
"""
import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from lab import Notebook, browser_page, missing, server, write_notebook

SETUP = """
import resource, time
import numpy as np
from expertflow.cache import ExpertCache
from expertflow.evictor import LRU
from expertflow.map import Board, ResidencyMap, HIT, MISSED, EVICTED, IN_TIME

L, E, rate = {layers}, {experts}, {rate}
cache = ExpertCache([E] * L, L * E // 2, LRU(L * E))
cache.owner[:] = np.random.default_rng(0).permutation(L * E)[:len(cache.owner)]

class Busy(Board):
    "A board whose events are new ones each time that they are looked at."
    many = np.random.default_rng(1).choice(np.array([0, 0, 0, HIT, MISSED, EVICTED, IN_TIME], np.uint8), (32, L, E))
    n = 0
    @property
    def events(self): self.n += 1; return self.many[self.n % 32]
    @events.setter
    def events(self, x): ...

def used(): r = resource.getrusage(resource.RUSAGE_SELF); return r.ru_utime + r.ru_stime
board = Busy(cache)
m = ResidencyMap(board, rate=rate)
m.paused = True
m
"""


PAINTED = "document.querySelector('canvas.ef-cells').painted"
SHOWN = "[...document.querySelector('canvas.ef-cells').cells.slice(0, 64)].map(x => x.toString(16).padStart(2, '0')).join('')"


def spell(nb: Notebook, active: bool, seconds: float) -> tuple[float, float]:
    "Pictures painted, and processor time, both per second."
    nb.ask(f"setattr(m, 'paused', {not active})")
    nb.page.wait_for_timeout(500)
    painted, cpu, t = nb.page.evaluate(PAINTED), nb.ask("used()"), time.perf_counter()
    nb.page.wait_for_timeout(1000 * seconds)
    more, cpu, t = nb.page.evaluate(PAINTED) - painted, nb.ask("used()") - cpu, time.perf_counter() - t
    return more / t, cpu / t


def after_stop(nb: Notebook) -> tuple[float, int]:
    "Seconds until the kernel's last picture is the one shown, and pictures painted after that."
    nb.ask("m.painter.stop()")
    t = time.perf_counter()
    nb.page.wait_for_function(f"() => {SHOWN} === '{nb.ask('m.picture().tobytes()[:64].hex()')}'", timeout=10_000)
    seconds, painted = time.perf_counter() - t, nb.page.evaluate(PAINTED)
    nb.page.wait_for_timeout(1500)
    return seconds, nb.page.evaluate(PAINTED) - painted


def measure(layers: int, experts: int, rate: float, seconds: float, rounds: int) -> dict:
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as address, browser_page() as page:
        write_notebook(Path(folder) / "bench.ipynb", SETUP.format(layers=layers, experts=experts, rate=rate))
        nb = Notebook(page, address, "bench.ipynb")
        assert nb.run_all(), "the notebook failed"
        page.wait_for_selector("canvas.ef-cells")
        page.wait_for_timeout(3000)
        pairs = [(spell(nb, False, seconds), spell(nb, True, seconds)) for _ in range(rounds)]
        cost = statistics.median(busy[1] - idle[1] for idle, busy in pairs)
        painted = statistics.median(busy[0] for _, busy in pairs)
        backlog, late = after_stop(nb)
        assert not page.complaints, page.complaints
        nb.close()
    return {"layers": layers, "experts": experts, "asked": rate, "painted": painted, "kernel_share": cost,
            "backlog_seconds": backlog, "pictures_after_stop": late}


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 48), ("experts", 128), ("rate", 16), ("seconds", 6), ("rounds", 5)):
        p.add_argument(f"--{name}", type=type(default), default=default)
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    if why := missing(): sys.exit(why)
    r = measure(a.layers, a.experts, a.rate, a.seconds, a.rounds)
    if a.json: print(json.dumps(r))
    else:
        print(f"{r['layers']} x {r['experts']} experts, {r['asked']} pictures a second asked for: {r['painted']:.1f} painted; "
              f"{r['kernel_share']:.2%} of a core in the kernel; after a stop the last one was there within "
              f"{r['backlog_seconds']:.2f} s, {r['pictures_after_stop']} came later")
