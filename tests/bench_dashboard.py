"""What an open dashboard costs the one who generates:

    python tests/bench_dashboard.py [--tokens 48 --rounds 9]

In a notebook in JupyterLab with a real browser the same prompt is answered with the dashboard open and without one, in turn. The
figure is the median of the rounds' ratios of decoding speed. `--where kernel`: the same without a browser, its messages are
thrown away; what is left is the kernel's part. `--where neighbour`: no dashboard at all, but a process that is busy for an
eighth of the time, about what a browser takes: what this machine makes of that.
"""
import argparse
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
from expertflow.dashboard import Speaker, figures
flow = ExpertFlow.from_pretrained("smollm2-moe", gpu_memory_budget="50%")
place, panel = W.VBox(), None
def show(yes):
    global panel
    if panel is not None: panel.close()
    panel = flow.dashboard() if yes else None
    place.children = [panel] if yes else []
speaker = Speaker(flow)
def begin(n):
    (panel.speaker if panel else speaker).run("Why is the sky blue?", max_new_tokens=n, min_new_tokens=n, do_sample=False)
def rate():
    s = panel.speaker if panel else speaker
    return None if s.running else figures(s).rate
place"""


NEIGHBOUR = """import time
while True:
    t = time.perf_counter()
    while time.perf_counter() - t < 0.01: pass
    time.sleep(0.07)"""


def in_turn(one: Callable[[bool], float], rounds: int) -> list[tuple[float, float]]:  # tokens/s without and with
    one(True), one(False)
    out = []
    for i in range(rounds):
        a, b = (one(bool(i % 2)), one(not i % 2))
        out.append((b, a) if i % 2 else (a, b))
    return out


def with_browser(tokens: int, rounds: int) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as address, browser_page(1280, 1400) as page:
        write_notebook(Path(folder) / "bench.ipynb", SETUP)
        nb = Notebook(page, address, "bench.ipynb")
        assert nb.run_all()

        def one(with_panel: bool) -> float:
            nb.ask(f"show({with_panel})")
            if with_panel: page.wait_for_selector("canvas.ef-cells")
            page.wait_for_timeout(1000)
            nb.ask(f"begin({tokens})")
            while (rate := nb.ask("rate()")) is None: page.wait_for_timeout(1000)
            return rate

        out = in_turn(one, rounds)
        assert not page.complaints, page.complaints
        return out


@contextmanager
def kernel() -> Iterator[Callable[[str], Any]]:
    "A kernel in which SETUP has run, whose messages nobody looks at: a function that evaluates an expression there."
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
        assert client.execute(SETUP, reply=True, timeout=200)["content"]["status"] == "ok"
        yield ask
    finally:
        over.set()
        manager.shutdown_kernel(now=True)


def without_browser(tokens: int, rounds: int, panel: bool) -> list[tuple[float, float]]:
    with kernel() as ask:
        def one(more: bool) -> float:
            ask(f"show({more and panel})")
            busy = subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) if more and not panel else None
            time.sleep(1.0)
            try:
                ask(f"begin({tokens})")
                while (rate := ask("rate()")) is None: time.sleep(1.0)
                return rate
            finally:
                if busy: busy.kill()

        return in_turn(one, rounds)


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, default=48)
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--where", choices=("browser", "kernel", "neighbour"), default="browser")
    a = p.parse_args()
    if why := missing(): sys.exit(why)
    how = (a.tokens, a.rounds)
    rounds = with_browser(*how) if a.where == "browser" else without_browser(*how, panel=a.where == "kernel")
    ratios = sorted(with_it / without for without, with_it in rounds)
    low, _, high = statistics.quantiles(ratios, n=4)
    speed = statistics.median(x for x, _ in rounds)
    ratio = statistics.median(ratios)
    what = "a busy neighbour instead of the dashboard" if a.where == "neighbour" else f"the dashboard open, {a.where}"
    print(f"decoding with {what}: {ratio:.3f} of the speed without (quartiles {low:.3f}-{high:.3f}), "
          f"{len(ratios)} rounds of {a.tokens} tokens, {speed:.1f} tokens/s without")
