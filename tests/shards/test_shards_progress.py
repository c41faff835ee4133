"""Progress: a bar with rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

import pytest

from shards.base import progress
from shards.base.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set by hand."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Not a fixture: pytest sets stderr anew between a fixture and its test."""
    screen = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    return screen


def test_a_bar_on_a_terminal(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with Progress(1000, "pictures", print, bar=True) as bar:
        clock[0] += 2
        bar.step(100)
        clock[0] += 8
        bar.step(400)
        bar._bar.refresh()
    text = screen.getvalue()
    assert "500 of 1000 pictures, 50/s, 0:00:10 left" in text


def test_plain_lines_elsewhere(clock: list[float]) -> None:
    lines: list[str] = []
    with Progress(1000, "pictures", lines.append, bar=True) as plain:
        plain.step(10)
        assert lines == []
        clock[0] += 20
        plain.step(390)
    assert lines == ["400 of 1000 pictures, 20/s, 0:00:30 left"]


def test_no_rate_before_the_first_sample(clock: list[float]) -> None:
    lines: list[str] = []
    with Progress(1000, "pictures", lines.append, bar=True) as plain:
        clock[0] += 20
        plain.step(0)
    assert lines == ["0 of 1000 pictures"]


def test_items_are_passed_on_and_steps_counted_from_where_they_were(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in training that resumes at step 40, with two micro-batches to a step."""
    screen = terminal(monkeypatch)
    bar = Progress(100, "steps", None, bar=True, title="main 3/9", done=40)
    seen = []
    for item in bar.over(range(20), lambda item: item % 2):
        seen.append(item)
        clock[0] += 1
    assert seen == list(range(20))
    assert bar.done == 50
    assert "main 3/9" in screen.getvalue()
    assert "50 of 100 steps, 0.5/s, 0:01:40 left" in screen.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_nothing_is_shown_without_a_log_where_no_bar_can_be(
    is_terminal: bool, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = terminal(monkeypatch)
    monkeypatch.setattr(screen, "isatty", lambda: is_terminal)
    for _ in Progress(9, "steps", None, bar=not is_terminal).over(range(9)):
        clock[0] += 20
    assert screen.getvalue() == ""


def test_a_line_that_is_due_has_title_and_note(clock: list[float]) -> None:
    lines: list[str] = []
    bar = Progress(10, "steps", lines.append, bar=False, title="main 1/2")
    clock[0] += 1
    bar.step(1)
    bar.note, bar.line_due = "loss 0.500", True
    clock[0] += 1
    bar.step(1)
    bar.step(1)
    assert lines == ["main 1/2: 2 of 10 steps, loss 0.500, 1.0/s, 0:00:08 left"]


def test_work_that_cannot_be_counted_says_that_it_goes_on() -> None:
    lines: list[str] = []
    with progress.waiting("fitting", lines.append, first=0.01):
        progress.time.sleep(0.2)
    assert lines == ["fitting: 0:00:00"]
