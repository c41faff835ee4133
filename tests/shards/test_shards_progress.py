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


def test_a_bar_on_a_terminal(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    with Progress(1000, "pictures", print) as bar:
        clock[0] += 2
        bar.step(100)
        clock[0] += 8
        bar.step(400)
        bar._bar.refresh()
    text = screen.getvalue()
    assert "500 of 1000 pictures, 50/s, 0:00:10 left" in text


def test_plain_lines_elsewhere(clock: list[float]) -> None:
    lines: list[str] = []
    with Progress(1000, "pictures", lines.append) as plain:
        plain.step(10)
        assert lines == []
        clock[0] += 20
        plain.step(390)
    assert lines == ["400 of 1000 pictures, 20/s, 0:00:30 left"]


def test_no_rate_before_the_first_sample(clock: list[float]) -> None:
    lines: list[str] = []
    with Progress(1000, "pictures", lines.append) as plain:
        clock[0] += 20
        plain.step(0)
    assert lines == ["0 of 1000 pictures"]
