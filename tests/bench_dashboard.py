"""What an open dashboard costs the one who generates:

    python tests/bench_dashboard.py [--tokens 72 --rounds 50]

In a notebook in JupyterLab with a real browser the same prompt is answered with the dashboard open and without one, in turn. The
figure is the ratio of decoding speeds over all rounds, with its 90 % interval (bootstrap over rounds), and that of the median
token, which slow spells of the machine do not touch. `--where kernel`: the same without a browser, its messages are thrown away;
what is left is the kernel's part. `--where neighbour`: no dashboard at all, but a process that is busy for an eighth of the time:
what this machine makes of that. `--rate`: pictures a second, instead of the dashboard's own choice.
"""
import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab import Notebook, browser_page, missing, server, write_notebook

SETUP = """from transformers.utils import logging
logging.disable_progress_bar()
import ipywidgets as W
from expertflow import ExpertFlow
from expertflow.dashboard import Speaker
flow = ExpertFlow.from_pretrained("smollm2-moe", gpu_memory_budget="50%")
place, panel = W.VBox(), None
def show(yes):
    global panel
    if panel is not None: panel.close()
    panel = flow.dashboard(rate=RATE) if yes else None
    place.children = [panel] if yes else []
speaker = Speaker(flow)
def begin(n):
    (panel.speaker if panel else speaker).run("Why is the sky blue?", max_new_tokens=n, min_new_tokens=n, do_sample=False)
def times():
    s = panel.speaker if panel else speaker
    return None if s.running else [b - a for a, b in zip(s.meter.ticks, s.meter.ticks[1:])]
place"""


NEIGHBOUR = """import time
while True:
    t = time.perf_counter()
    while time.perf_counter() - t < 0.01: pass
    time.sleep(0.07)"""


Times = list[float]  # s, of each token after the first of a run


def in_turn(one: Callable[[bool], Times], rounds: int) -> list[tuple[Times, Times]]:  # without and with
    one(True), one(False)
    out = []
    for i in range(rounds):
        a, b = (one(bool(i % 2)), one(not i % 2))
        out.append((b, a) if i % 2 else (a, b))
    return out


def with_browser(setup: str, tokens: int, rounds: int) -> list[tuple[Times, Times]]:
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as address, browser_page(1280, 1400) as page:
        write_notebook(Path(folder) / "bench.ipynb", setup)
        nb = Notebook(page, address, "bench.ipynb")
        assert nb.run_all()

        def one(with_panel: bool) -> Times:
            nb.ask(f"show({with_panel})")
            if with_panel: page.wait_for_selector("canvas.ef-cells")
            page.wait_for_timeout(3000)                     # what opening and closing leave behind is done
            nb.ask(f"begin({tokens})")
            while (times := nb.ask("times()")) is None: page.wait_for_timeout(500)
            return times

        out = in_turn(one, rounds)
        assert not page.complaints, page.complaints
        return out


@contextmanager
def kernel(setup: str) -> Iterator[Callable[[str], Any]]:
    "A kernel in which `setup` has run, whose messages nobody looks at: a function that evaluates an expression there."
    from jupyter_client.manager import start_new_kernel
    manager, client = start_new_kernel()
    over = threading.Event()

    def drain() -> None:
        while not over.is_set():
            try: client.get_iopub_msg(timeout=1)
            except Exception: continue

    def ask(expression: str) -> Any:
        more = {"user_expressions": {"r": f"repr({expression})"}, "silent": True, "reply": True, "timeout": 100}
        answer = client.execute("", **more)["content"]["user_expressions"]["r"]
        if answer["status"] != "ok": raise RuntimeError(answer)
        return eval(eval(answer["data"]["text/plain"]))

    threading.Thread(target=drain, daemon=True).start()
    try:
        assert client.execute(setup, reply=True, timeout=200)["content"]["status"] == "ok"
        yield ask
    finally:
        over.set()
        manager.shutdown_kernel(now=True)


def without_browser(setup: str, tokens: int, rounds: int, panel: bool) -> list[tuple[Times, Times]]:
    with kernel(setup) as ask:
        def one(more: bool) -> Times:
            ask(f"show({more and panel})")
            busy = subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) if more and not panel else None
            time.sleep(3.0)
            try:
                ask(f"begin({tokens})")
                while (times := ask("times()")) is None: time.sleep(0.5)
                return times
            finally:
                if busy: busy.kill()

        return in_turn(one, rounds)


def interval(rounds: list[tuple[Times, Times]], n: int = 2000) -> tuple[float, float]:  # 5 % and 95 %
    sums, draw = [(sum(a), sum(b)) for a, b in rounds], random.Random(0)
    drawn = ([draw.choice(sums) for _ in sums] for _ in range(n))
    ratios = sorted(sum(a for a, _ in x) / sum(b for _, b in x) for x in drawn)
    return ratios[n // 20], ratios[-n // 20]


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, default=72)
    p.add_argument("--rounds", type=int, default=50)
    p.add_argument("--where", choices=("browser", "kernel", "neighbour"), default="browser")
    p.add_argument("--rate", type=float, help="pictures a second")
    a = p.parse_args()
    if why := missing(): sys.exit(why)
    how = (SETUP.replace("RATE", str(a.rate)), a.tokens, a.rounds)
    rounds = with_browser(*how) if a.where == "browser" else without_browser(*how, panel=a.where == "kernel")
    without, with_it = ([t for r in rounds for t in r[i]] for i in (0, 1))
    (low, high), median = interval(rounds), statistics.median(without) / statistics.median(with_it)
    what = "a busy neighbour instead of the dashboard" if a.where == "neighbour" else f"the dashboard open, {a.where}"
    ratio, speed = sum(without) / sum(with_it), len(without) / sum(without)
    print(f"decoding with {what}: {ratio:.3f} of the speed without (90 %: {low:.3f}-{high:.3f}), the median token {median:.3f}; "
          f"{len(rounds)} rounds of {a.tokens} tokens, {speed:.1f} tokens/s without")
