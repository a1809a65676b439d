"The live map without a browser: its states are those of the cache, its threads end, and the one who generates does not notice."
import base64
import io
import random
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image

from expertflow import ExpertFlow
from expertflow.cache import ABSENT, ExpertCache, admit, check, done, end, failed, loaded, reserve, resize
from expertflow.config import ConfigError
from expertflow.evictor import LRU
from expertflow.foresight import record_steps
from expertflow.map import (
    AWAY,
    COLD,
    EVENT,
    EVICTED,
    EXPECTED,
    HIT,
    IN_TIME,
    LATE,
    LOADING,
    MISSED,
    NOBODY,
    PINNED,
    RESIDENT,
    WASTED,
    WHERE,
    Board,
    Film,
    Painter,
    ResidencyMap,
    board_of,
    cells_of,
    counts_of,
    film_of,
    png,
)  # fmt: skip
from expertflow.simulator import simulate
from expertflow.yardsticks import from_pairs

NO_PAINTER = 1e-3      # pictures a second: none, as far as a test is concerned


def expected(cache: ExpertCache) -> np.ndarray:
    "Where everybody is and what is said of them, the slow way."
    out = np.full((len(cache.num_experts), cache.E), NOBODY, np.uint8)
    for layer, row in enumerate(cache.slot_of):
        for e, slot in enumerate(row):
            flat = cache.flat(layer, e)
            out[layer, e] = 0 if slot == ABSENT else LOADING if cache.loading[slot] else RESIDENT
            pinned = slot != ABSENT and cache.pins[slot] > 0
            out[layer, e] |= PINNED * pinned | COLD * cache.cold[flat] | EXPECTED * cache.expected[flat]
    return out


def agrees(board: Board) -> None:
    cells = cells_of(board)
    assert np.array_equal(np.where(board.nobody, cells, cells & ~np.uint8(EVENT)), expected(board.cache))


@pytest.mark.parametrize("seed", range(4))
def test_states_are_those_of_the_cache_after_every_operation(seed):
    rng = random.Random(seed)
    cache = ExpertCache([9, 4, 7], n_slots=6, evictor=LRU(27), threshold=rng.choice([0.7, 1.0]))
    cache.cold[[1, 10]] = True
    board, events = board_of(cache), dict.fromkeys((HIT, MISSED, IN_TIME, LATE), 0)
    for _ in range(60):
        for x in reserve(cache, rng.randrange(3), rng.sample(range(9), 2), evict=1): cache_move(cache, board, x, rng)
        layer = rng.randrange(3)
        needed = rng.sample(range(cache.num_experts[layer]), rng.randint(1, 4))
        step = cache.begin(layer, needed)
        row = cells_of(board)[layer] & EVENT
        assert set(np.flatnonzero(np.isin(row, list(events)))) == set(needed)
        assert set(np.flatnonzero(row == MISSED)) == set(step.misses) and set(np.flatnonzero(row == LATE)) == step.late
        for kind in events: events[kind] += int((row == kind).sum())
        agrees(board)
        while step.pinned or step.misses:
            if not step.pinned: cache.loading[:] = False        # prefetches had all the slots: they arrive
            for x in admit(cache, step):
                agrees(board)
                loaded(cache, x)
            for e in list(step.pinned):
                cache.loading[cache.slot_of[layer][e]] = False
                done(cache, step, e)
                agrees(board)
        end(cache, step)
        agrees(board)
        if rng.random() < 0.1 and not cache.loading.any(): resize(cache, rng.randint(4, 8))
        agrees(board)
        check(cache)
    n = cache.count
    assert events[MISSED] == n.misses and sum(events.values()) == n.hits + n.misses == sum(board.used)
    assert events[IN_TIME] == n.in_time > 0 and events[LATE] == n.late > 0 and events[HIT] > 0
    assert np.bincount(board.last, minlength=n.steps + 1)[n.steps] == len(needed)


def cache_move(cache: ExpertCache, board: Board, x, rng: random.Random) -> None:
    "A prefetch arrives, stays on its way, or fails."
    agrees(board)
    luck = rng.random()
    if luck < 0.5: loaded(cache, x)
    elif luck < 0.6: failed(cache, x)
    agrees(board)


def test_who_goes_and_who_was_called_off():
    cache = ExpertCache([6], n_slots=2, evictor=LRU(6))
    board = board_of(cache)
    a, b = reserve(cache, 0, [0, 1])
    loaded(cache, a)
    cache.call_off(b.slot)
    failed(cache, b)                        # nothing was in its slot: that is no eviction
    assert cells_of(board)[0, 1] & EVENT == 0
    step = cache.begin(0, [2, 3])
    for x in admit(cache, step): loaded(cache, x)
    end(cache, step)
    assert cells_of(board)[0, 0] & EVENT == WASTED
    step = cache.begin(0, [4])
    for x in admit(cache, step): loaded(cache, x)
    assert sorted(cells_of(board)[0] & EVENT) == [0, 0, 0, 0, MISSED, EVICTED] and cache.count.evictions == 2


# a real run

@pytest.fixture(scope="module")
def flow():
    with ExpertFlow.from_pretrained("tiny-moe", gpu_memory_budget="25%", eviction_policy="lru", preload=False) as flow: yield flow


def run(flow, n=12): return flow.generate("Once upon a time there was", max_new_tokens=n, do_sample=False)


def test_pictures_taken_while_experts_come_and_go():
    "By another thread, between any two bytecodes: an expert that never was there is not shown as there."
    cache = ExpertCache([8] * 4, 16, LRU(32))
    board, over = Board(cache), threading.Event()

    def churn():
        while not over.is_set():
            cache.take(0, 1, 3)
            cache.drop(3)

    thread, before = threading.Thread(target=churn), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        end = time.monotonic() + 3
        while time.monotonic() < end:
            assert cells_of(board)[3, 7] == AWAY
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)


def test_a_run_looks_as_the_simulator_says_and_writes_the_same(flow):
    before = run(flow)
    cache = flow.runtime.cache
    with ExpertFlow.from_pretrained("tiny-moe", gpu_memory_budget="25%", eviction_policy="lru", preload=False) as fresh:
        film = Film(board_of(fresh.runtime.cache))
        with record_steps(fresh.runtime) as steps: assert run(fresh) == before
        film.stop()
        count = fresh.runtime.cache.count
    assert [(layer, sorted(e)) for layer, e in film.steps] == steps
    load = from_pairs(steps, cache.num_experts)
    other = film_of(load, cache.n_slots, "lru", link="instant", warmup_steps=cache.warmup_steps)
    assert len(film.frames) == len(other.frames) == 12 and film.ends == other.ends
    same = [np.frombuffer(a, np.uint8) == np.frombuffer(b, np.uint8) for a, b in zip(film.frames, other.frames, strict=True)]
    assert np.mean(same[1:]) == 1.0         # waves of the prompt may end in another order: who is thrown out then, is not certain
    assert other.result.misses == count.misses and other.result.hits == count.hits


def test_a_map_takes_nothing_away(flow):
    before = run(flow)
    m = ResidencyMap.of(flow)
    try:
        assert run(flow) == before
        cells, cache = m.picture(), flow.runtime.cache
        m.paint()
        assert (m.picture() & WHERE == RESIDENT).sum() == cache.n_slots - len(cache.free) and cells.shape == (8, 32)
        assert str(cache.n_slots - len(cache.free)) + " resident" in repr(m)
    finally: m.close()
    assert flow.runtime.cache.watcher is None


def test_the_painter_follows_a_run(flow):
    m, seen = ResidencyMap.of(flow, rate=200.0), []
    m.observe(lambda change: seen.append(change["new"]), "cells")
    try: run(flow, 30)
    finally: m.close()
    assert m.painter.error is None and len(set(seen)) > 5
    moved = counts_of(np.frombuffer(seen[-1], np.uint8))
    assert moved["resident"] > 0 and moved["hit"] + moved["missed"] > 0


# threads

def painters() -> list[str]: return [t.name for t in threading.enumerate() if "painter" in t.name]


def small() -> ExpertCache: return ExpertCache([4, 3], n_slots=3, evictor=LRU(8))


def test_nothing_is_left_behind():
    cache = small()
    a, b = ResidencyMap.of(cache), ResidencyMap.of(cache)
    assert a.board is b.board is cache.watcher and len(painters()) == 2
    a.close()
    assert cache.watcher is b.board and len(painters()) == 1     # the other one still looks
    b.close()
    b.close()
    assert cache.watcher is None and not painters()


def test_closed_by_somebody_else_ends_the_painter():
    cache = small()
    m = ResidencyMap.of(cache, rate=50.0)
    super(ResidencyMap, m).close()                                # as Widget.close_all does
    m.painter.thread.join(3)
    assert not painters() and cache.watcher is None and m.painter.error is None


def test_pause_keeps_the_last_picture():
    cache = small()
    m = ResidencyMap.of(cache, rate=NO_PAINTER)
    try:
        m.paused = True
        before = m.cells
        step = cache.begin(0, [1])
        admit(cache, step)
        assert m.paint() and m.cells == before
        m.paused = False
        assert m.paint() and m.cells != before
    finally: m.close()


def test_fast_pictures_are_sent_two_at_a_time():
    cache = small()
    m, sent = ResidencyMap.of(cache, rate=15.0), []
    m.painter.stop()
    m.observe(lambda change: sent.append(change["new"]), "cells")
    def picture() -> bytes: return cells_of(m.board).tobytes()
    def use(layer: int, expert: int) -> None:
        step = cache.begin(layer, [expert])
        for x in admit(cache, step): loaded(cache, x)
        done(cache, step, expert)
        end(cache, step)
    try:
        shown, pictures = m.cells, []
        for layer, expert in ((0, 1), (0, 2), (1, 0)):
            use(layer, expert)
            pictures.append(picture())
            assert m.turn()
        assert len({shown, *pictures}) == 4 and sent == [pictures[0] + pictures[1]]
        assert m.turn() and m.turn() and sent[1:] == [pictures[2]]          # the last one does not wait for another
        assert m.picture().tobytes() == pictures[2] and m.period == pytest.approx(1000 / 15)
        use(1, 1)
        pictures.append(picture())
        assert m.turn() and m.picture().tobytes() == pictures[2]
        use(1, 2)
        assert m.paint() and sent[2:] == [pictures[3] + picture()]             # asked for, it comes at once
        use(0, 3)
        assert m.turn() and m.held
        m.paused = True
        assert m.turn() and not m.held, "not shown after the pause"
        m.paused = m.pairs = False
        use(0, 2)
        assert m.turn() and sent[-1] == picture()
    finally: m.close()


def test_slow_pictures_are_left_out_not_queued():
    calls = []
    def slow() -> bool:
        calls.append(time.perf_counter())
        time.sleep(0.05)
        return True
    p = Painter(slow, rate=100.0)
    time.sleep(0.5)
    p.stop()
    n = len(calls)
    time.sleep(0.2)
    assert 3 <= n <= 11 and len(calls) == n and not p.thread.is_alive()


def test_an_error_ends_the_painter_and_is_kept():
    p = Painter(lambda: {}["x"])
    p.thread.join(3)
    assert isinstance(p.error, KeyError) and not p.thread.is_alive()


# pictures and films

def test_png_is_a_picture_and_always_the_same():
    cells = np.arange(256, dtype=np.uint8).reshape(8, 32)
    data = png(cells)
    image = Image.open(io.BytesIO(data))
    image.load()
    assert data == png(cells) and image.size == (32 * 14 + 8, 8 * 14 + 8) and len(data) < 8000
    squares = {image.crop((4 + 14 * c, 4, 18 + 14 * c, 18)).tobytes() for c in (RESIDENT, HIT | RESIDENT, EVICTED, LOADING)}
    assert len(squares) == 4
    assert Image.open(io.BytesIO(png(np.zeros((48, 256), np.uint8)))).size == (256 * 3 + 8, 48 * 3 + 8)


def test_saved_notebooks_hold_a_picture_only(monkeypatch):
    m = ResidencyMap.of(small(), rate=NO_PAINTER)
    try:
        monkeypatch.setenv("IN_TEST", "1")
        data, _ = m._repr_mimebundle_()
        assert set(data) == {"text/plain", "image/png"} and base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
        assert "0x" not in data["text/plain"]
        monkeypatch.delenv("IN_TEST")
        data, _ = m._repr_mimebundle_()
        assert {"image/png", "application/vnd.jupyter.widget-view+json"} <= set(data)
    finally: m.close()


def test_film_of_a_recording():
    rng = np.random.default_rng(0)
    load = from_pairs([(layer, rng.choice(5, 2, replace=False).tolist()) for _ in range(50) for layer in range(3)], [5, 5, 5])
    film = film_of(load, 6, "lru", frames=10)
    assert len(film.frames) <= 11 and film.passes[-1] == 49 and film.passes[0] == 0
    m = ResidencyMap.from_trace(film)
    m.at, m.hovered = len(film.frames) - 1, 7
    uses = sum(layer == 1 and 2 in e for layer, e in film.steps)
    assert f"needed {uses} times" in m.detail["text"] and "simulated" in m.title and m.painter is None
    m.at = 0
    assert "needed 1 times" in m.detail["text"] or "needed 0 times" in m.detail["text"]
    m.close()


def test_films_that_cannot_be():
    with pytest.raises(ConfigError, match="one cache"):
        simulate(from_pairs([(0, [1]), (1, [0])], [2, 2]), 2, per_layer=True, watch=Board)
    with pytest.raises(ConfigError, match="without a picture"): ResidencyMap.from_trace(Film(Board(small())))
