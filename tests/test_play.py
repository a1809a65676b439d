"Controls over a drawing: with a kernel they move it, without one there is the picture."
import subprocess
import sys

import pytest

from expertflow.play import play

@pytest.fixture
def drawn(monkeypatch):
    monkeypatch.delenv("IN_TEST", raising=False)
    seen = []

    def draw(card, link): seen.append((card, link))
    return draw, seen


def test_moving_a_control_draws_again(drawn):
    draw, seen = drawn
    box = play(draw, card=(4, 24), link=["fast", "slow"], start={"card": 8})
    card, link = box.children[0].children
    assert seen == [(8, "fast")] and (card.min, card.max) == (4, 24) and not card.continuous_update
    card.value = 12
    link.value = "slow"
    assert seen[1:] == [(12, "fast"), (12, "slow")]
    card.value = 99
    assert card.value == 24     # cannot leave its limits


def test_a_reader_gets_the_picture(drawn, monkeypatch):
    draw, seen = drawn
    monkeypatch.setenv("IN_TEST", "1")
    assert play(draw, card=(4, 24), link=["fast"]) is None and seen == [(14, "fast")]


def test_without_ipywidgets_there_is_the_picture(repo):
    code = "import sys; sys.modules['ipywidgets'] = None; from expertflow.play import play; print(play(print, x=(1, 3)))"
    code = code.replace("play(print", "play(lambda x: print(x)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repo, env={"PYTHONPATH": str(repo)})
    assert out.stdout.split() == ["2", "None"], out.stderr
