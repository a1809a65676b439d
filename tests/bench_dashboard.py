"""What an open dashboard costs the one who generates:

    python tests/bench_dashboard.py [--tokens 48 --rounds 9]

In a notebook in JupyterLab with a real browser the same prompt is answered with the dashboard open and without one, in turn. The
figure is the median of the rounds' ratios of decoding speed.
"""
import argparse
import statistics
import sys
import tempfile
from pathlib import Path

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


def measure(tokens: int, rounds: int) -> list[tuple[float, float]]:  # tokens/s without and with
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

        one(True), one(False)
        out = []
        for i in range(rounds):
            a, b = (one(bool(i % 2)), one(not i % 2))
            out.append((b, a) if i % 2 else (a, b))
        assert not page.complaints, page.complaints
        return out


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--tokens", type=int, default=48)
    p.add_argument("--rounds", type=int, default=9)
    a = p.parse_args()
    if why := missing(): sys.exit(why)
    rounds = measure(a.tokens, a.rounds)
    ratios = sorted(with_it / without for without, with_it in rounds)
    low, _, high = statistics.quantiles(ratios, n=4)
    speed = statistics.median(x for x, _ in rounds)
    ratio = statistics.median(ratios)
    print(f"decoding with the dashboard open: {ratio:.3f} of the speed without (quartiles {low:.3f}-{high:.3f}), "
          f"{len(ratios)} rounds of {a.tokens} tokens, {speed:.1f} tokens/s without")
