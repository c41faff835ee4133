"""The pages in a real browser (chromium, headless): they open, draw and filter without a console error.

`make test` installs chromium on Debian as root. Without chromium these tests are skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest
from mlflow_store import Server, runs_in
from trained import Trained, command

from pipeline.config import TrackingConfig
from pipeline.tracking.tracker import start_tracker

pytest_plugins = ["mlflow_fixtures"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


def open_page(address: str, profile: Path, milliseconds: int = 3000) -> tuple[str, list[str]]:
    """(the document after its scripts ran, console messages)"""
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --enable-logging=stderr --dump-dom --window-size=1500,1200"
    )
    time = f"--virtual-time-budget={milliseconds}"
    line = [str(CHROMIUM), *flags.split(), time, f"--user-data-dir={profile}", address]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def test_the_report_opens_without_a_console_message(trained: Trained, tmp_path: Path) -> None:
    command("pipeline.report", f"uri={trained.uri}", f"out={tmp_path}/report")
    document, console = open_page((tmp_path / "report" / "report.html").as_uri(), tmp_path / "profile")
    assert console == []
    assert "digits, rho=10, noise=0.5" in document


def test_the_audit_page_counts_its_pictures_without_a_console_message(trained: Trained, tmp_path: Path) -> None:
    command("pipeline.audit", trained.folder, f"out={tmp_path}/audit")
    document, console = open_page((tmp_path / "audit" / "audit.html").as_uri(), tmp_path / "profile")
    assert console == []
    counted = re.search(r"(\d+) of (\d+) pictures", document)
    assert counted is not None, "the filter did not run"
    assert counted[1] == counted[2]
    assert len(re.findall('class="card( focused)?"', document)) == min(48, int(counted[1]))  # a page of them


@pytest.mark.slow
def test_mlflows_pages_name_both_runs_and_draw_both_curves(database: Path, tmp_path: Path) -> None:
    server = Server(database)
    server.start()
    try:
        found = {}
        for method in ("cross_entropy", "prototypical"):
            config = TrackingConfig(uri=server.uri, experiment="demo", system_metrics=False)
            name = f"{method} seed=0 · digits rho=10 noise=0.5"
            tracker = start_tracker(config, tmp_path / method, name, {"method.name": method}, {"method": method})
            for epoch in range(1, 6):
                tracker.log(epoch, {"test/top1": 10.0 * epoch, "loss/ce": 1 / epoch})
            assert tracker.finish("FINISHED")
            found[name] = tracker.run_id
        experiment = runs_in(server.uri)[0].info.experiment_id
        both = f"runs={json.dumps(list(found.values()))}&experiments={json.dumps([experiment])}"
        metric = f"metric?{both}&metric={json.dumps('test/top1')}&plot_metric_keys={json.dumps(['test/top1'])}"
        for number, page in enumerate((f"experiments/{experiment}/runs", f"compare-runs?{both}", metric)):
            address = f"{server.uri}/#/{quote(page, safe='/?=&')}"
            document, console = open_page(address, tmp_path / f"profile{number}", 25_000)
            assert not [line for line in console if ":ERROR:" in line]
            assert all(name in document for name in found), page
        colours = re.findall(r'class="js-line" d="M[^"]+"[^>]*stroke: (rgb\([^)]*\))', document)
        assert len(set(colours)) == 2
    finally:
        server.kill()
