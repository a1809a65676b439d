"The dashboard without a browser: what its controls do to a model that writes, that nothing is left of it, and that errors show."
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from traitlets import TraitError

from expertflow import ExpertFlow, ExpertFlowError, dashboard
from expertflow.config import POLICIES, WEIGHTS, ConfigError
from expertflow.dashboard import Controls, Dashboard, Speaker, Wishes, decoding, figures, memory_html, shared_out
from expertflow.map import RESIDENT, WHERE, cells_of

pytest_plugins = ["simdev.plugin"]
PROMPT = "Once upon a time there was a"


@pytest.fixture(scope="module")
def flow():
    with ExpertFlow.from_pretrained("tiny-moe", gpu_memory_budget="40%") as flow: yield flow


@pytest.fixture
def panel(flow):
    panel = flow.dashboard(prompt=PROMPT, max_new_tokens=2000)
    yield panel
    panel.close()
    flow.set(gpu_memory_budget="40%", eviction_policy="priority_based", priority_weights=WEIGHTS, strict=True, strict_layers=(),
             tolerance=0.0, prediction_lookahead=0, token_block_size=None)


def until(true: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def threads() -> list[str]:
    ours = tuple(f"expertflow-{x}" for x in ("painter", "panel", "wishes", "speaker", "what", "generate"))
    return [t.name for t in threading.enumerate() if t.name.startswith(ours)]


def writing(panel: Dashboard, tokens: int = 3) -> None:
    n = len(panel.speaker.meter.ticks) if panel.speaker.running else 0
    until(lambda: panel.speaker.running and len(panel.speaker.meter.ticks) >= n + tokens)


# running and stopping

def test_run_and_stop_by_their_buttons(panel, flow):
    panel.run.click()
    writing(panel)
    until(lambda: panel.run.disabled and not panel.halt.disabled)
    at = len(panel.speaker.meter.ticks)
    panel.halt.click()
    assert panel.speaker.wait(20) and len(panel.speaker.meter.ticks) <= at + 2     # one that came meanwhile, the one under way
    until(lambda: not panel.run.disabled and panel.halt.disabled)
    panel.refresh()
    assert "ready" in panel.status.value
    until(lambda: panel.map.text == panel.speaker.text)
    assert f"<b style='font-size:15px'>{len(panel.speaker.meter.ticks)}</b>" in panel.map.beside[0]


def test_the_text_is_the_models(panel, flow):
    panel.tokens.value = 12
    panel.run.click()
    assert panel.speaker.wait()
    assert panel.speaker.text == flow.generate(PROMPT, max_new_tokens=12, do_sample=False)


def test_picture_and_words_are_one_message(panel, flow, monkeypatch):
    "Two would be two frames for the browser."
    panel.painter.stop()
    panel.map.pairs, sent = False, []
    def send(m, buffers=None): sent.append({*m["state"], *(path[0] for path in m["buffer_paths"])})
    monkeypatch.setattr(panel.map, "_send", send)
    panel.speaker.run(PROMPT, max_new_tokens=4, do_sample=False)
    assert panel.speaker.wait()
    assert panel.refresh() and sent == [{"cells", "text", "beside"}]
    assert panel.refresh() and len(sent) == 1, "nothing new, nothing sent"
    panel.map.paused, panel.speaker.text = True, "more text"
    flow.generate(PROMPT, max_new_tokens=3, do_sample=False)
    assert panel.refresh() and sent[1:] == [{"paused"}, {"text"}], "words go on when the map pauses"
    panel.map.paused = False
    assert panel.refresh() and sent[3:] == [{"paused"}, {"cells"}]


@pytest.mark.parametrize("rate", [0, -1.0, 31, 1e-10, float("nan"), "8"])
def test_rates_that_cannot_be(rate, flow):
    before = threads()
    with pytest.raises(ConfigError, match="pictures a second"): flow.dashboard(rate=rate)
    assert threads() == before


def test_rates(flow, monkeypatch):
    for cores, device, rate in ((2, "cpu", 2.0), (3, "cpu", 8.0), (2, "cuda", 8.0)):
        monkeypatch.setattr(dashboard, "cores", lambda n=cores: n)
        assert dashboard.pictures(SimpleNamespace(device=torch.device(device)), None) == rate
    panel = flow.dashboard(rate=20)
    try: assert panel.painter.period == 1 / 20 and panel.map.period == 50 and panel.map.pairs
    finally: panel.close()


def test_the_same_figures_as_the_report(flow):
    s = Speaker(flow)
    s.run(PROMPT, max_new_tokens=16, do_sample=False)
    assert s.wait()
    f, g = figures(s), flow.generations[-1]
    assert f.tokens == g.new_tokens == 16 and f.bytes_per_token * 16 == pytest.approx(g.bytes_loaded)
    assert f.cached + f.in_time + f.late == pytest.approx(g.hit_rate) and f.missed == pytest.approx(1 - g.hit_rate)
    assert f.rate == pytest.approx(1 / g.tpot, rel=0.2) and f.ttft == pytest.approx(g.ttft, rel=0.5, abs=0.05)


def test_figures_while_the_next_run_begins(flow):
    "The painter asks for figures when somebody presses Run: they are of one run, not of two."
    s = Speaker(flow)
    s.run(PROMPT, max_new_tokens=4, do_sample=False)
    assert s.wait()
    old, new = s.meter, Speaker(flow).meter

    class Swapped(Speaker):
        meter = property(lambda self: turns.pop(0) if len(turns) > 1 else turns[0], lambda self, meter: None)

    s.__class__, turns = Swapped, [old, new]
    assert figures(s).tokens == 4


def test_an_error_shows_and_the_next_run_works(panel, flow, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError("the disk is gone")
    with monkeypatch.context() as m:
        m.setattr(flow.runtime.store, "read_into", broken)
        flow.set(gpu_memory_budget="20%")
        panel.run.click()
        assert panel.speaker.wait()
    panel.refresh()
    assert "the disk is gone" in panel.status.value and "alert" in panel.status.value
    panel.tokens.value = 5
    panel.run.click()
    assert panel.speaker.wait() and not panel.speaker.error and len(panel.speaker.meter.ticks) == 5
    panel.refresh()
    assert "ready" in panel.status.value and "gone" not in panel.status.value


def test_an_empty_prompt_is_refused_in_words(panel):
    panel.prompt.value = ""
    panel.run.click()
    assert panel.speaker.wait()
    panel.refresh()
    assert "must not be empty" in panel.status.value


# settings while it writes

def test_every_control_reaches_the_model_while_it_writes(panel, flow):
    panel.run.click()
    writing(panel)
    c, cache = panel.controls.c, flow.runtime.cache
    moves = {"budget": (20, lambda: cache.n_slots == 52), "policy": ("lru", lambda: type(cache.evictor).__name__ == "LRU"),
             "threshold": (0.8, lambda: cache.threshold == 0.8), "warmup": (40, lambda: cache.warmup_steps == 40),
             "prefetch": (True, lambda: flow.foresight is not None),
             "ahead": (2, lambda: flow.foresight and flow.foresight.lookahead == 2),
             "strict": (False, lambda: flow.config.strict is False),
             "strict_layers": ((0, 7), lambda: tuple(flow.config.strict_layers) == (0, 7)),
             "tolerance": (0.1, lambda: flow.runtime.tolerance == dict.fromkeys(range(1, 7), 0.1))}
    for name, (value, arrived) in moves.items():
        assert not arrived(), name
        c[name].value = value
        until(arrived)
        assert panel.speaker.running, f"the run ended before {name}"
    writing(panel)
    assert not panel.wishes.error and not panel.speaker.error
    until(lambda: c["block"].disabled)              # the prompt under way has its memory for blocks of the old size
    panel.halt.click()
    assert panel.speaker.wait()
    until(lambda: not c["block"].disabled)
    c["block"].value = 32
    until(lambda: flow.config.token_block_size == 32)


def test_weights_always_sum_to_one(panel, flow):
    rng = np.random.default_rng(0)
    for _ in range(30):
        name = list(WEIGHTS)[rng.integers(3)]
        panel.controls.c[name].value = round(float(rng.random()), 2)
        weights = {k: panel.controls.c[k].value for k in WEIGHTS}
        assert sum(weights.values()) == pytest.approx(1, abs=1e-9) and min(weights.values()) >= 0
    until(lambda: not panel.wishes.pending)
    assert not panel.wishes.error and flow.config.priority_weights == pytest.approx(weights)
    assert shared_out({"a": 1.0, "b": 0.0, "c": 0.0}, "b") == {"a": 1.0, "b": 0.0, "c": 0.0}


def test_what_cannot_be_cannot_be_chosen_and_says_why(panel, flow):
    c, notes = panel.controls.c, panel.controls.notes
    assert c["budget"].min * flow.plan.total_experts >= 100 * flow.plan.min_slots > 0
    assert c["tolerance"].disabled and "strict is on" in notes["tolerance"].value
    assert c["ahead"].disabled and "prefetching is off" in notes["ahead"].value
    c["policy"].value = "lru"
    assert c["recency"].disabled and "priority_based" in notes["recency"].value
    assert c["host"].disabled and c["host"].value == 0 and "there is none, the device is the host" in notes["host"].value
    assert set(c["policy"].options) == set(POLICIES) and c["ahead"].max <= flow.plan.moe_layers - 1
    for name in c: assert any(ch.isdigit() or ch.isalpha() for ch in notes[name].value)
    assert "%" in notes["budget"].value and "layers" in notes["ahead"].value and "layer-steps" in notes["warmup"].value


def test_the_host_budget_behind_a_device(sim):
    "Its slider reaches the model while it writes, ends where it must, shows what others set, and what is refused."
    with ExpertFlow.from_pretrained("tiny-moe", gpu_memory_budget="40%", cpu_memory_budget="30%", system_reserve="1MB") as flow:
        panel = flow.dashboard(prompt=PROMPT, max_new_tokens=2000)
        try:
            w, note = panel.controls.c["host"], panel.controls.notes["host"]
            least, total, size = flow.config.io_threads + 1, flow.plan.total_experts, flow.plan.slot_bytes
            assert not w.disabled and w.value == 30 and w.max == 100 and (w.min - 1) * total < 100 * least <= w.min * total
            assert f"% of the experts, {w.min} to 100" in note.value and f"({flow.host_slots} of {total}, " in note.value
            panel.run.click()
            writing(panel)
            w.value = 60
            until(lambda: flow.host_slots == round(0.6 * total))
            w.value = w.min
            until(lambda: flow.host_slots == round(w.min * total / 100))
            assert panel.speaker.running and flow.config.cpu_memory_budget == f"{w.min}%" and not panel.wishes.error
            writing(panel)
            until(lambda: f"{flow.host_slots} of {total}" in note.value and "host: " in panel.map.beside[1])
            flow.set(cpu_memory_budget="80%")
            until(lambda: w.value == 80)
            panel.wishes.want(cpu_memory_budget=f"{size}B")
            until(lambda: not panel.wishes.pending)
            panel.refresh()
            assert "the host tier needs at least" in panel.status.value and flow.host_slots == round(0.8 * total)
            panel.halt.click()
            assert panel.speaker.wait() and not panel.speaker.error
        finally: panel.close()


def test_a_refused_wish_shows_and_changes_nothing(panel, flow):
    before = flow.config
    panel.wishes.want(gpu_memory_budget="900TB")
    until(lambda: not panel.wishes.pending)
    panel.refresh()
    assert "alert" in panel.status.value and "900 TB" in panel.status.value and flow.config == before
    panel.controls.c["budget"].value = 41
    until(lambda: not panel.wishes.pending)
    panel.refresh()
    assert "alert" not in panel.status.value


def test_a_refused_control_goes_back(panel, flow):
    budget = panel.controls.c["budget"]
    before, budget.max = budget.value, 1000
    budget.value = 1000
    until(lambda: panel.wishes.error)
    until(lambda: budget.value == before)
    assert flow.config.gpu_memory_budget == "40%"


def test_as_many_tokens_as_the_context_has(panel, flow):
    before = flow.config.context
    for context in (before + 64, before):
        flow.set(context=context)
        until(lambda: panel.tokens.max == flow.config.context)
        until(lambda: panel.tokens.tooltip.endswith(f" {flow.config.context}"))


@pytest.mark.parametrize("size", [48, "auto"])
def test_blocks_of_any_size_are_shown(size, panel, flow):
    "Set by somebody else, to what the panel does not offer."
    flow.set(token_block_size=size)
    until(lambda: panel.controls.shown == flow.settings.version)
    assert panel.controls.c["block"].value == size and panel.painter.thread.is_alive()
    time.sleep(0.3)
    assert flow.config.token_block_size == size, "no echo"


def test_dragging_makes_few_changes_and_the_last_one_counts():
    made = []
    def slow(**changes):
        time.sleep(0.05)
        made.append(changes)
    wishes = Wishes(slow)
    for i in range(50): wishes.want(x=i)
    until(lambda: not wishes.pending)
    wishes.close()
    assert len(made) <= 3 and made[-1] == {"x": 49} and not wishes.thread.is_alive()


# two panels

def test_two_panels_agree_and_do_not_fight(panel, flow):
    other = flow.dashboard(prompt="Me too", max_new_tokens=20)
    try:
        panel.run.click()
        writing(panel)
        other.run.click()
        other.refresh()
        assert "busy" in other.status.value and not other.speaker.running and panel.speaker.running
        other.controls.c["budget"].value = 30
        until(lambda: flow.config.gpu_memory_budget == "30%" and not other.wishes.pending)
        until(lambda: panel.controls.c["budget"].value == 30)
        version = flow.settings.version
        time.sleep(0.6)                             # no echo: neither panel sets again what the other one shows
        assert flow.settings.version == version and panel.map.board is other.map.board
        panel.halt.click()
        assert panel.speaker.wait()
        other.run.click()
        assert other.speaker.wait() and other.speaker.text
    finally: other.close()
    assert flow.runtime.cache.watcher is panel.map.board


# the end

def test_closing_stops_everything(flow):
    panel = flow.dashboard(prompt=PROMPT, max_new_tokens=2000)
    for i in (1, 2, 3):
        panel.tabs.box.selected_index, panel.tabs.drawn = i, 0
        panel.refresh()
    panel.run.click()
    writing(panel)
    panel.close()
    panel.close()
    assert not threads() and flow.runtime.cache.watcher is None and flow.runtime.executor.timeline is None
    assert flow.generate(PROMPT, max_new_tokens=4, do_sample=False)


def test_nothing_is_left_of_a_panel_that_could_not_be_made(flow):
    before = threads()
    with pytest.raises(TraitError): flow.dashboard(max_new_tokens="many")
    assert threads() == before and flow.runtime.cache.watcher is None


def test_a_predictor_that_is_not_there_is_no_reason_not_to_open(flow):
    flow.set(prediction_model_path="/not/there", prediction_lookahead=0)
    panel = flow.dashboard(prompt=PROMPT)
    try:
        panel.controls.c["prefetch"].value = True
        until(lambda: panel.wishes.error)
        assert "/not/there" in panel.wishes.error
        until(lambda: not panel.controls.c["prefetch"].value)
    finally:
        panel.close()
        flow.set(prediction_model_path=None)


def test_closed_while_somebody_else_generates(flow):
    "Tokens that come while the panel is taken down: none of them leaves the executor noting its copies for ever."
    panel = flow.dashboard(prompt=PROMPT)
    stop, panel.diary.wish = panel.diary.stop, True
    def meanwhile():
        stop()
        flow.generate(PROMPT, max_new_tokens=4)
    panel.diary.stop = meanwhile
    panel.close()
    assert flow.runtime.executor.timeline is None and panel.diary.times is None


def test_the_map_closed_in_the_middle_of_a_refresh(flow):
    panel = flow.dashboard(prompt=PROMPT)
    panel.tabs.refresh = panel.map.close
    until(lambda: not threads())
    assert flow.runtime.cache.watcher is None and panel.run.disabled and panel.halt.disabled and panel.painter.error is None


def test_buttons_do_not_wait_for_the_painter(flow):
    panel = flow.dashboard(prompt=PROMPT, max_new_tokens=2000, rate=np.float32(0.1))
    try:
        panel.run.click()
        assert panel.run.disabled and not panel.halt.disabled and "writing" in panel.status.value
        panel.run.click()
        assert "alert" in panel.status.value and not panel.halt.disabled
    finally: panel.close()
    assert not threads()


@pytest.mark.parametrize("what", ["panel", "map"])
def test_closed_by_somebody_else(what, flow):
    panel = flow.dashboard(prompt=PROMPT, max_new_tokens=2000)
    panel.run.click()
    writing(panel)
    if what == "panel": super(Dashboard, panel).close()             # as Widget.close_all does
    else: panel.map.close()
    until(lambda: not threads())
    assert flow.runtime.cache.watcher is None


def test_the_map_shows_what_the_runtime_has(panel, flow):
    panel.tokens.value = 10
    panel.run.click()
    assert panel.speaker.wait()
    cache = flow.runtime.cache
    until(lambda: np.array_equal(panel.map.picture(), cells_of(panel.map.board)))       # two pictures are sent at a time
    assert (panel.map.picture() & WHERE == RESIDENT).sum() == cache.n_slots - len(cache.free) - int(cache.loading.sum())


def test_tabs(panel, flow):
    def show(i: int):
        panel.tabs.box.selected_index, panel.tabs.drawn = i, 0
        panel.refresh()
        return panel.tabs.made[i]
    what = show(1)
    what.start()
    what.thread.join()
    assert "write something first" in what.words.value
    assert "off" in show(2).words.value
    panel.controls.c["prefetch"].value = True
    until(lambda: flow.foresight is not None)
    panel.tokens.value = 12
    panel.run.click()
    assert panel.speaker.wait() and not panel.speaker.error
    layer = max(flow.foresight.latest)
    panel.map.hovered = layer * 32
    assert f"last predicted with {flow.foresight.latest[layer][0]:.0%}" in panel.map.detail["text"]
    predictor = show(2)
    assert len(predictor.charts[0].fig.data[0].y) == flow.foresight.lookahead and max(predictor.charts[1].fig.data[0].y) > 0.3
    timeline = show(3)
    assert len(timeline.chart.fig.data[0].y) == 8 and min(timeline.chart.fig.data[0].x) >= 0
    what.start()
    what.thread.join()
    what.refresh()
    steps, figs = decoding(panel.diary), [c.fig for c in what.charts]
    assert what.words.value.startswith("simulated") and f"{len(steps.tokens)} tokens" in what.words.value
    assert all("simulated" in f.layout.title.text for f in figs)
    assert not any("cloud" in str(f._config).lower() for f in figs)
    assert [t.name for t in figs[0].data[:2]] == ["MIN", "priority_based"]
    for fig in figs:
        assert all(np.all(np.array(fig.data[0].y) >= np.array(t.y) - 1e-9) for t in fig.data[1:] if t.y is not None)


def test_memory_adds_up(flow):
    snapshot = flow.ledger.snapshot()
    for t in snapshot.values(): assert sum(t["reservations"].values()) + t["free"] == t["capacity"]
    assert "device" in memory_html(snapshot)


def test_without_widgets_it_says_what_to_install(flow, monkeypatch):
    import sys
    monkeypatch.delitem(sys.modules, "expertflow.dashboard", raising=False)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ExpertFlowError, match=r"pip install 'expertflow\[lab\]'"): flow.dashboard()


def test_controls_do_not_ask_for_what_they_show(flow):
    asked = []
    controls = Controls(flow, lambda **k: asked.append(k))
    flow.set(gpu_memory_budget="55%", eviction_threshold=0.77)
    controls.show(flow.settings.now)
    assert not asked and controls.c["budget"].value == 55 and controls.c["threshold"].value == 0.77
    flow.set(gpu_memory_budget="40%", eviction_threshold=None)
