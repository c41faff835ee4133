"""For tests of tracking and reports: a real MLflow server, and questions to it or to a local database."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any


def client_of(uri: str | Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri if isinstance(uri, str) else f"sqlite:///{uri}")


def runs_in(uri: str | Path) -> list[Any]:
    client = client_of(uri)
    return list(client.search_runs([e.experiment_id for e in client.search_experiments()]))


def history(uri: str | Path, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client_of(uri).get_metric_history(run_id, key)]


class Server:
    """`mlflow server` on a database, to be started, stopped, hung and killed."""

    def __init__(self, database: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.database, self.process = database, None
        self.uri = f"http://127.0.0.1:{self.port}"

    process: subprocess.Popen[bytes] | None

    def start(self) -> None:
        store = ["--backend-store-uri", f"sqlite:///{self.database}"]
        artifacts = ["--artifacts-destination", str(self.database.parent / "served")]
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        environment = {
            **os.environ,
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        log = (self.database.parent / "server.log").open("ab")
        command = [sys.executable, "-m", "mlflow", "server", *store, *artifacts, *place]
        self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        until = time.monotonic() + 90
        while time.monotonic() < until:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError((self.database.parent / "server.log").read_text()[-2000:])

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            self.process.wait()
            self.process = None
