"""The live views as people see them: JupyterLab and a real browser. Skipped without one (see tests/lab.py).

Pictures of the last run are kept in the folder named by EXPERTFLOW_SCREENSHOTS, if there is one.
"""
import importlib.util
import os
import time
from pathlib import Path

import pytest
from lab import Notebook, browser_page, missing, server, voila, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(500),
              pytest.mark.skipif(missing() is not None, reason=missing() or "")]
CELLS = "document.querySelector('canvas.ef-cells')"
LOAD = """from transformers.utils import logging
logging.disable_progress_bar()
from expertflow import ExpertFlow
flow = ExpertFlow.from_pretrained("tiny-moe", gpu_memory_budget="40%")"""


@pytest.fixture
def page():
    with browser_page() as page:
        yield page
        if folder := os.environ.get("EXPERTFLOW_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            name = os.environ["PYTEST_CURRENT_TEST"].split("::")[1].split()[0]
            page.screenshot(path=Path(folder) / f"{name}.png")


@pytest.fixture
def lab(tmp_path):
    with server(tmp_path) as address: yield tmp_path, address


def opened(page, lab, *cells: str) -> Notebook:
    folder, address = lab
    write_notebook(folder / "view.ipynb", *cells)
    nb = Notebook(page, address, "view.ipynb")
    assert nb.run_all(), "a cell failed"
    page.wait_for_function(f"() => {CELLS}?.painted > 0", timeout=60_000)
    return nb


def pixels(page) -> list[int]:
    "What is on the canvas, not what it was told to paint."
    return page.evaluate(f"""() => {{
        const c = {CELLS}, d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        const out = []; for (let i = 0; i < d.length; i += 4 * 7) out.push(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
        return out }}""")


def button(page, name: str): return page.get_by_role("button", name=name, exact=True)


def test_run_drag_watch_stop(page, lab):
    nb = opened(page, lab, LOAD, "panel = flow.dashboard(prompt='Once upon a time', max_new_tokens=3000)\npanel")
    still = pixels(page)
    assert len(set(still)) >= 3                             # the ground, who is there and who is not, before anything has run
    button(page, "Run").click()
    nb.until("len(panel.speaker.meter.ticks) > 5")
    page.wait_for_function("() => document.querySelector('.ef-text')?.textContent.length > 10", timeout=60_000)
    page.wait_for_function(f"() => {CELLS}.painted > 5", timeout=60_000)
    first, moving = page.inner_text(".ef-text"), pixels(page)
    assert moving != still

    handle = page.locator(".widget-slider .noUi-handle").first      # the budget, dragged to the left while the model writes
    box, before, version = handle.bounding_box(), nb.ask("flow.runtime.cache.n_slots"), nb.ask("flow.settings.version")
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    for i in range(12):
        page.mouse.move(x - 5 * i, y)
        page.wait_for_timeout(40)
    page.mouse.up()
    nb.until(f"flow.runtime.cache.n_slots < {before} and not panel.wishes.pending")
    after = nb.ask("(flow.runtime.cache.n_slots, flow.plan.slots, panel.controls.c['budget'].value)")
    assert after[0] == after[1] and nb.ask("flow.config.gpu_memory_budget") == f"{after[2]}%"
    assert nb.ask("panel.speaker.running") and 1 <= nb.ask("flow.settings.version") - version <= 60
    page.wait_for_function(f"() => document.querySelector('.ef-text').textContent.length > {len(first) + 5}", timeout=60_000)

    n = nb.ask("len(panel.speaker.meter.ticks)")
    button(page, "Stop").click()
    nb.until("not panel.speaker.running")
    assert nb.ask("len(panel.speaker.meter.ticks)") < 3000 and nb.ask("panel.speaker.error") == ""
    resident = "sum(s >= 0 for s in flow.runtime.cache.owner) - int(flow.runtime.cache.loading.sum())"
    wanted = nb.ask(f"int({resident})")
    page.wait_for_function(f"() => Number({CELLS}.dataset.resident) === {wanted}", timeout=20_000)
    assert n >= 5 and page.evaluate(f"[...{CELLS}.cells]") == nb.ask("panel.map.picture().ravel().tolist()")
    assert not page.complaints, page.complaints


def test_an_error_shows_in_the_panel_and_the_next_run_works(page, lab):
    nb = opened(page, lab, LOAD, "panel = flow.dashboard(prompt='', max_new_tokens=8)\npanel")
    button(page, "Run").click()
    page.wait_for_selector("[role=alert]", timeout=30_000)
    assert "must not be empty" in page.inner_text("[role=alert]")
    page.locator("textarea").first.fill("Once upon a time")
    button(page, "Run").click()
    nb.until("len(panel.speaker.meter.ticks) == 8 and not panel.speaker.running")
    gone = "() => !document.querySelector('[role=alert]') && document.querySelector('.ef-text').textContent"
    page.wait_for_function(gone, timeout=30_000)
    assert not page.complaints, page.complaints


def test_keyboard_pause_and_words(page, lab):
    nb = opened(page, lab, LOAD, "panel = flow.dashboard(prompt='Once upon a time', max_new_tokens=3000)\npanel")
    page.locator("canvas.ef-cells").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"): page.keyboard.press(key)
    nb.until("panel.map.hovered == 33")
    told = "() => /layer 1, expert 1: .*; needed/.test(document.querySelector('.ef-detail').textContent)"
    page.wait_for_function(told, timeout=30_000)
    button(page, "Run").click()
    nb.until("len(panel.speaker.meter.ticks) > 3")
    page.keyboard.press("Tab")
    button(page, "Pause").click()
    nb.until("panel.map.paused")
    page.wait_for_timeout(500)
    shown, ticks = pixels(page), nb.ask("len(panel.speaker.meter.ticks)")
    nb.until(f"len(panel.speaker.meter.ticks) > {ticks + 3}")
    assert pixels(page) == shown                            # the last picture stays, while the model goes on
    button(page, "Resume").click()
    page.wait_for_timeout(1500)
    assert pixels(page) != shown and not page.complaints
    button(page, "Stop").click()
    nb.until("not panel.speaker.running")


def test_tabs_draw_their_charts(page, lab):
    more = "panel = flow.dashboard(prompt='Once upon a time', max_new_tokens=40)\npanel"
    nb = opened(page, lab, LOAD + "\nflow.set(prediction_lookahead=1)", more)
    button(page, "Run").click()
    nb.until("panel.speaker.after.hits and not panel.speaker.running")
    for i, name in enumerate(("What if", "Predictor", "Timeline"), 1):
        page.locator(".lm-TabBar-tab", has_text=name).click()
        nb.until(f"{i} in panel.tabs.made", 90)
        if name == "What if":
            button(page, "Replay").click()
            nb.until("panel.tabs.made[1].words.value.startswith('simulated')", 120)
    line, bars = ".scatterlayer .trace path.js-line", ".barlayer .point"
    for name, marks in (("What if", line), ("Predictor", bars), ("Timeline", bars)):
        page.locator(".lm-TabBar-tab", has_text=name).click()
        drawn = f"() => [...document.querySelectorAll('{marks}')].some(e => e.getClientRects().length)"
        page.wait_for_function(drawn, timeout=120_000)
    buttons = page.evaluate("[...document.querySelectorAll('.modebar-btn')].map(e => e.dataset.title)")
    assert buttons and not [b for b in buttons if b and ("cloud" in b.lower() or "share" in b.lower() or "studio" in b.lower())]
    assert nb.ask("panel.painter.error") is None and not page.complaints, page.complaints


TALK = """import numpy as np
from expertflow.map import ResidencyMap
from expertflow.yardsticks import from_pairs
rng = np.random.default_rng(0)
load = from_pairs([(layer, rng.choice(16, 3, replace=False).tolist()) for _ in range(30) for layer in range(6)], [16] * 6)
talk = ResidencyMap.from_trace(load, slots=0.4)
talk"""


def test_a_film_plays_without_the_kernel(page, lab):
    nb = opened(page, lab, TALK)
    first = pixels(page)
    page.locator(".ef-scrub").focus()
    page.keyboard.press("End")
    page.wait_for_function("() => /pass 30/.test(document.querySelector('.ef-title').textContent)", timeout=20_000)
    assert pixels(page) != first and "simulated" in page.inner_text(".ef-title")
    nb.until("talk.at == 29")
    page.keyboard.press("Home")
    page.wait_for_function("() => /pass 1$/.test(document.querySelector('.ef-title').textContent)", timeout=20_000)
    nb.close()                                              # the pictures are in the browser
    button(page, "Play").click()
    page.wait_for_function("() => /pass ([5-9]|1\\d)$/.test(document.querySelector('.ef-title').textContent)", timeout=20_000)
    assert not page.complaints, page.complaints


def test_a_wide_map_scrolls_to_its_last_expert(page, lab):
    opened(page, lab, TALK.replace("(16, 3,", "(1500, 3,").replace("[16]", "[1500]"))
    at = page.evaluate("""() => {
        const box = document.querySelector('.ef-picture'), room = box.clientWidth, width = box.scrollWidth;
        box.scrollLeft = width;
        const c = document.querySelector('canvas.ef-cells').getBoundingClientRect(), b = box.getBoundingClientRect();
        return {room, width, canvas: c.width, right: c.right, edge: b.left + room, y: c.top + 1} }""")
    assert at["width"] > at["room"] and at["canvas"] <= at["width"] and abs(at["right"] - at["edge"]) <= 1
    page.mouse.move(at["right"] - 2, at["y"])
    page.wait_for_function("() => /expert 149\\d:/.test(document.querySelector('.ef-detail').textContent)", timeout=20_000)
    assert not page.complaints, page.complaints


def test_readable_on_a_dark_page(tmp_path):
    with server(tmp_path, dark=True) as address, browser_page() as page:
        opened(page, (tmp_path, address), TALK)
        page.wait_for_timeout(1000)
        ground = page.evaluate("getComputedStyle(document.querySelector('.jp-Notebook')).backgroundColor")
        assert max(int(x) for x in ground.strip("rgb()").split(",")[:3]) < 100
        absent = page.evaluate(f"""() => {{
            const c = {CELLS}, i = c.cells.indexOf(0), E = 16, w = (c.width - 26) / E, h = c.height / 6;
            return [...c.getContext('2d').getImageData(26 + (i % E + 0.5) * w, (Math.floor(i / E) + 0.5) * h, 1, 1).data] }}""")
        assert absent[:3] == [0x2c, 0x2f, 0x35]             # the colour of the dark set


def test_a_closed_panel_leaves_no_thread(page, lab):
    nb = opened(page, lab, LOAD, "panel = flow.dashboard(prompt='Once upon a time', max_new_tokens=3000)\npanel")
    button(page, "Run").click()
    nb.until("len(panel.speaker.meter.ticks) > 3")
    nb.ask("panel.close()")
    end = time.monotonic() + 30
    ours = "('expertflow-p', 'expertflow-w', 'expertflow-s')"
    left = f"[t.name for t in __import__('threading').enumerate() if t.name.startswith({ours})]"
    while nb.ask(left): assert time.monotonic() < end
    page.wait_for_function(f"() => !{CELLS}", timeout=30_000)


@pytest.mark.skipif(importlib.util.find_spec("voila") is None, reason="voila is not installed")
def test_the_panel_as_an_app(page, tmp_path):
    "Without JupyterLab: Voila gives the panel a page of its own."
    write_notebook(tmp_path / "app.ipynb", LOAD, "flow.dashboard(prompt='Once upon a time', max_new_tokens=3000)")
    with voila(tmp_path / "app.ipynb") as address:
        page.goto(address)
        page.wait_for_function(f"() => {CELLS}?.painted > 0", timeout=120_000)
        still = pixels(page)
        button(page, "Run").click()
        page.wait_for_function("() => document.querySelector('.ef-text')?.textContent.length > 10", timeout=60_000)
        page.wait_for_function(f"() => {CELLS}.painted > 5", timeout=60_000)
        assert pixels(page) != still and button(page, "Run").is_disabled()
        button(page, "Stop").click()
        stopped = "() => [...document.querySelectorAll('button')].find(b => b.textContent === 'Stop').disabled"
        page.wait_for_function(stopped, timeout=20_000)
        text, painted = page.inner_text(".ef-text"), page.evaluate(f"{CELLS}.painted")
        page.wait_for_timeout(1500)
        assert page.inner_text(".ef-text") == text and page.evaluate(f"{CELLS}.painted") - painted <= 2
        ours = [x for x in page.complaints if "ERR_NAME_NOT_RESOLVED" not in x]  # Voila's own page asks for fonts elsewhere
        assert not ours, ours
