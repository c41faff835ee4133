"""Tracking against a real MLflow server that is late, hangs, dies, comes back, and whose answers get lost."""

from __future__ import annotations

import http.client
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mlflow_store import Server, history, runs_in

from pipeline.config import TrackingConfig
from pipeline.tracking import tracker as tracking
from pipeline.tracking.__main__ import replay
from pipeline.tracking.tracker import Tracker, start_tracker

pytest_plugins = ["mlflow_fixtures"]


@pytest.fixture(scope="module")
def server(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Not started yet."""
    database = tmp_path_factory.mktemp("server") / "mlflow.db"
    database.write_bytes(migrated.read_bytes())
    server = Server(database)
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "SYNC_SECONDS", 0.2)
    monkeypatch.setattr(tracking, "MAX_PAUSE", 1.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def start(uri: str, folder: Path, experiment: str) -> Tracker:
    config = TrackingConfig(uri=uri, experiment=experiment, system_metrics=False)
    return start_tracker(config, folder, "run", {"seed": 0}, {})


def wait_until(true: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.1)


def expected(epochs: range) -> list[tuple[int, float]]:
    return [(epoch, epoch / 2) for epoch in epochs]


def test_a_server_that_is_absent_then_hangs_then_dies_loses_nothing_and_never_holds_up_a_step(
    server: Server, tmp_path: Path
) -> None:
    slowest = 0.0

    def train(epochs: range) -> None:
        nonlocal slowest
        for epoch in epochs:
            began = time.perf_counter()
            tracker.log(epoch, {"test/top1": epoch / 2, "loss/ce": 1 / (epoch + 1)})
            slowest = max(slowest, time.perf_counter() - began)
            time.sleep(0.02)

    began = time.perf_counter()
    tracker = start(server.uri, tmp_path, "outage")
    slowest = time.perf_counter() - began
    train(range(0, 40))  # nobody there
    assert tracker.run_id is None
    server.start()
    wait_until(lambda: tracking.pending(tracker.path) == 0)
    server.signal(signal.SIGSTOP)  # there, but silent
    train(range(40, 140))
    assert tracking.pending(tracker.path) > 0
    server.signal(signal.SIGCONT)
    wait_until(lambda: tracking.pending(tracker.path) == 0)
    server.kill()
    train(range(140, 180))
    server.start()
    train(range(180, 200))
    assert tracker.finish("FINISHED", wait=60)
    assert slowest < 0.5, "a call of the training waited for the server"

    (run,) = [run for run in runs_in(server.uri) if run.info.run_id == tracker.run_id]
    assert run.info.status == "FINISHED"
    assert history(server.uri, run.info.run_id, "test/top1") == expected(range(200))
    assert len(history(server.uri, run.info.run_id, "loss/ce")) == 200


class Unreliable(BaseHTTPRequestHandler):
    """Passes requests on. One answer in seven is lost after the server has done its work, one in eleven is an
    error."""

    server_port_behind = 0
    count = 0
    lost = 0

    def _pass(self) -> None:
        Unreliable.count += 1
        number = Unreliable.count
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if number % 11 == 0:
            self.send_error(503)
            return
        connection = http.client.HTTPConnection("127.0.0.1", Unreliable.server_port_behind, timeout=10)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        if number % 7 == 0:
            Unreliable.lost += 1
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PATCH = _pass

    def log_message(self, *_: object) -> None:
        pass


def test_lost_answers_and_errors_end_with_one_run_and_every_step_exactly_once(server: Server, tmp_path: Path) -> None:
    if server.process is None:
        server.start()
    Unreliable.server_port_behind = server.port
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Unreliable)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        tracker = start(f"http://127.0.0.1:{proxy.server_port}", tmp_path, "unreliable")
        for epoch in range(60):
            tracker.log(epoch, {"test/top1": epoch / 2})
            time.sleep(0.05)
        wait_until(lambda: tracking.pending(tracker.path) == 0)
        tracker.finish("FINISHED", wait=10)
    finally:
        proxy.shutdown()
    assert Unreliable.lost > 2
    replay(tmp_path, server.uri)  # whatever the end of the run may have missed
    found = [run for run in runs_in(server.uri) if run.info.experiment_id != "0" and "evenhand.job" in run.data.tags]
    mine = [run for run in found if run.data.tags["evenhand.job"] == tracker.state()["job"]]
    assert len(mine) == 1
    assert mine[0].info.status == "FINISHED"
    assert history(server.uri, mine[0].info.run_id, "test/top1") == expected(range(60))
