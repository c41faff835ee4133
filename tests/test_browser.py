"""The pages in a real browser (chromium, headless): they open, draw and filter without a console error."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from trained import Trained, command

pytest_plugins = ["mlflow_fixtures"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]


def open_page(page: Path, profile: Path) -> tuple[str, list[str]]:
    """(the document after its scripts ran, console messages)"""
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --enable-logging=stderr --dump-dom --virtual-time-budget=3000"
    )
    line = [str(CHROMIUM), *flags.split(), f"--user-data-dir={profile}", page.as_uri()]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def test_the_report_opens_without_a_console_message(trained: Trained, tmp_path: Path) -> None:
    command("pipeline.report", "--uri", trained.uri, "--out", tmp_path / "report")
    document, console = open_page(tmp_path / "report" / "report.html", tmp_path / "profile")
    assert console == []
    assert "The paper's tables beside ours" in document


def test_the_audit_page_counts_its_pictures_without_a_console_message(trained: Trained, tmp_path: Path) -> None:
    command("pipeline.audit", trained.folder, "--out", tmp_path / "audit")
    document, console = open_page(tmp_path / "audit" / "audit.html", tmp_path / "profile")
    assert console == []
    counted = re.search(r"(\d+) of (\d+) pictures", document)
    assert counted is not None, "the filter did not run"
    assert counted[1] == counted[2] == str(document.count('class="card"'))
