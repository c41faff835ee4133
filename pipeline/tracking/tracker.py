"""Tracking that never makes the training wait: MLflow may be down, the training goes on.

Rank 0 appends to the run's journal and returns. A thread imports mlflow, sends the journal in batches and, when the
server comes back, continues where it stopped. What a dead job left is sent by

    python -m pipeline.tracking replay FOLDER [uri=URI]

One job is one MLflow run, whatever the number of ranks and restarts: the job's key is in the journal, in the
checkpoint and a tag of the run.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import subprocess
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Literal

from pipeline.config import TrackingConfig, tracking_environment
from pipeline.tracking import journal
from pipeline.tracking.colors import style
from pipeline.tracking.journal import Journal, Record, pending, rewind
from shards.base.redact import one_line, redact, redact_all

Status = Literal["FINISHED", "FAILED", "KILLED"]
JOURNAL = "journal.jsonl"
DRAW = "draw"  # tag of a sweep's runs: seed and bias of the data were drawn together, with this number
VARIED = "varied"  # tag of a sweep's runs: the settings it varies besides method and seed
SYNC_SECONDS = 2.0  # between batches
MAX_PAUSE = 60.0  # between attempts while the server does not answer
SAMPLE_SECONDS = 10.0  # between samples of CPU, memory and GPU use
QUIET_SECONDS = 600.0  # sampling waits this long for the first logged epoch
DEFAULT_URI = str(TrackingConfig.model_fields["uri"].default)
log = logging.getLogger(__name__)


def tracking_uri(uri: str = "", of_run: str = "") -> str:
    """Where commands look for runs: the typed URI, that of the run's settings, the environment, the default."""
    return uri or of_run or tracking_environment().get("uri") or DEFAULT_URI


class NullTracker:
    """Tracking on ranks other than 0: the same calls, no effect."""

    run_id: str | None = None
    experiment_id = ""  # known once MLflow has answered
    lost = False  # the journal of the checkpoint is gone, perhaps with a machine's disk

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics of one step. Returns at once, never raises."""

    def artifact(self, path: str | Path, to: str = "", table: bool = False) -> None:
        """Upload a file or a folder; `to`: where among the run's artifacts (a folder keeps its name).

        table: JSON in the layout of `mlflow.log_table`, which MLflow then shows as a table.
        """

    def dataset(self, facts: dict[str, Any]) -> None:
        """Record the training data: name, digest, source and counts."""

    def model(self, folder: str | Path, register_as: str = "") -> None:
        """Log an exported model (pipeline.inference.model) as an MLflow model."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs to continue the same run."""
        return {}

    def finish(self, status: Status, wait: float | None = None) -> bool:
        """End the run; True if everything reached the server in at most `wait` seconds."""
        return True


class Tracker(NullTracker):
    """Tracking on rank 0; made by `start_tracker`."""

    def __init__(
        self,
        config: TrackingConfig,
        folder: Path,
        journal: Journal,
        job: str,
        run_id: str | None,
        began: int,
        kept: int,
        lost: bool,
    ) -> None:
        self.config, self.folder, self.path = config, folder, journal.path
        self.run_id, self.lost = run_id, lost
        self._journal, self._job = journal, job
        self._began, self._kept = (
            began,
            kept,
        )  # first start of the job in ms; bytes of the journal from earlier attempts
        self._wake, self._closing = threading.Event(), threading.Event()
        self._failures = 0
        self._logged = threading.Event()  # the trainer has logged something
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads that sample the machine and send the journal to MLflow."""
        if self.config.system_metrics:
            self._start_thread(self._sample_loop, "tracking-sampler")
        self._start_thread(self._sync_loop, "tracking-sync")

    # -- what the trainer calls --------------------------------------------------------------------

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._metrics(step, metrics)
        self._logged.set()

    def artifact(self, path: str | Path, to: str = "", table: bool = False) -> None:
        record: Record = {"kind": "artifact", "time": now(), "path": self._inside(path), "to": to}
        self._journal.append(record | ({"table": True} if table else {}))

    def dataset(self, facts: dict[str, Any]) -> None:
        self._journal.append({"kind": "dataset", "time": now(), "facts": facts})

    def model(self, folder: str | Path, register_as: str = "") -> None:
        record = {"kind": "model", "time": now(), "path": self._inside(folder), "register_as": register_as}
        self._journal.append(record)

    def state(self) -> dict[str, Any]:
        return {"job": self._job, "run_id": self.run_id, "offset": self._journal.size}

    def finish(self, status: Status, wait: float | None = None) -> bool:
        """Without `wait`: a minute; ten seconds for a job that was stopped or has failed, or whose server does not answer."""
        self._journal.append({"kind": "end", "time": now(), "status": status})
        if wait is None:
            wait = 10.0 if self._failures or status != "FINISHED" else 60.0
        self._closing.set()
        self._wake.set()
        until = time.monotonic() + wait
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self._journal.close()
        left = pending(self.path) if self.config.uri else 0
        if left:
            log.warning(
                "%d records have not reached %s; nothing is lost: python -m pipeline.tracking replay %s",
                left, redact(self.config.uri), self.folder,
            )  # fmt: skip
        return left == 0

    def _inside(self, path: str | Path) -> str:
        """Relative to the run's folder where possible, so that a copied folder can still be replayed."""
        absolute = Path(path).resolve()
        root = self.folder.resolve()
        return str(absolute.relative_to(root)) if absolute.is_relative_to(root) else str(absolute)

    # -- the threads -------------------------------------------------------------------------------

    def _start_thread(self, work: Any, name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _sync_loop(self) -> None:
        """Send, pause, send; after a failure the pauses grow; at the end there is one last attempt. The journal stays
        locked even if nothing is sent: a replay would end a run that is alive.
        """
        with journal.lock(self.path, self._closing) as mine:
            if not mine:
                return
            rewind(self.path, self._kept)  # only under the lock: a replay may have sent until now
            if not self.config.uri:
                self._closing.wait()
                return
            sync = None
            while True:
                last = self._closing.is_set()
                self._journal.fsync()
                try:
                    if sync is None:
                        from pipeline.tracking.mlflow_sync import JournalSync  # imports mlflow: seconds

                        sync = JournalSync(self.config.uri, self.path)
                    sync.sync(last)
                    self.run_id, self.experiment_id = sync.run_id, sync.experiment_id
                    if self._failures:
                        log.warning(
                            "MLflow at %s answers again; the journal has been sent.",
                            redact(self.config.uri),
                        )
                    self._failures = 0
                except Exception as error:
                    self._failures += 1
                    if self._failures == 1:
                        log.warning("MLflow at %s: %s. Training goes on; the journal keeps everything.",
                                    redact(self.config.uri), one_line(error))  # fmt: skip
                if last:
                    return
                pause = SYNC_SECONDS * (2**self._failures if self._failures < 6 else 64)
                self._wake.wait(min(pause, MAX_PAUSE))

    def _sample_loop(self) -> None:
        """CPU, memory and GPU use under MLflow's own names; the step counts samples since the job's first start."""
        from pipeline.tracking.system_metrics import usage

        begun, pause = time.monotonic(), 1.0
        while not self._closing.wait(pause):
            if not self._logged.is_set() and time.monotonic() < begun + QUIET_SECONDS:
                continue
            pause = SAMPLE_SECONDS
            with contextlib.suppress(Exception):
                self._metrics(int((now() - self._began) / 1000 / SAMPLE_SECONDS), usage(self.folder))

    def _metrics(self, step: int, metrics: dict[str, float]) -> None:
        """MLflow's compare page starts with the first metric it received: send accuracy first."""
        first = sorted(metrics, key=lambda key: key != "test/top1")
        values = {key: float(metrics[key]) for key in first}
        self._journal.append({"kind": "metrics", "time": now(), "step": int(step), "values": values})


def start_tracker(
    config: TrackingConfig,
    folder: Path,
    name: str,
    params: dict[str, object],
    tags: dict[str, str],
    state: dict[str, Any] | None = None,
) -> Tracker:
    """Open the run's journal, write its start and begin to send it. `state` comes from a checkpoint."""
    path = Path(folder) / JOURNAL
    parent = {"mlflow.parentRunId": config.parent} if config.parent else {}
    color = {"mlflow.runColor": style(tags["method"])["color"]} if "method" in tags else {}
    source = {"mlflow.user": _user(), "mlflow.source.name": "pipeline.train", **_commit()}
    start: Record = {
        "kind": "start",
        "experiment": config.experiment,
        "name": config.run_name or name,
        "params": redact_all({key: str(value) for key, value in params.items()}),
        "tags": redact_all(tags | config.tags | parent) | source | color,
    }
    start["job"], keep = _continue_or_set_aside(path, start, state)
    opened = Journal(path, keep)
    kept = opened.size
    began = next((int(record["time"]) for _, record in journal.read(path)), None) or now()
    opened.append({**start, "time": now()})
    run_id = (state or {}).get("run_id")
    tracker = Tracker(config, Path(folder), opened, start["job"], run_id, began, kept, lost=kept < keep)
    tracker.start()
    return tracker


def _continue_or_set_aside(path: Path, start: Record, state: dict[str, Any] | None) -> tuple[str, int]:
    """(job, bytes of the journal to keep). A journal of another job is renamed, never overwritten."""
    old, ended = None, False
    for _, record in journal.read(path):
        old = record if record.get("kind") == "start" else old
        ended = record.get("kind") == "end"
    if state and (old is None or old["job"] == state.get("job")):
        return state["job"], int(state.get("offset", 0))
    job = state["job"] if state else uuid.uuid4().hex
    if old is not None:
        if not state and not ended and old["params"] == start["params"]:
            return old["job"], 0  # it died before its first checkpoint and starts again: the same run
        aside = path.with_name(f"journal-{old['job'][:8]}.jsonl")
        for suffix in ("", ".shipped"):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    return job, 0


def now() -> int:
    return int(time.time() * 1000)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's numeric user has no name
        return str(os.getuid())


def _commit(file: Path = Path(__file__)) -> dict[str, str]:
    """The commit of this code: of the source tree, or EVENHAND_COMMIT of an image. A package that is installed inside
    another repository does not take that repository's commit.
    """
    known = os.environ.get("EVENHAND_COMMIT", "")
    if not known:
        command = ["git", "-C", str(file.parent), "rev-parse", "HEAD", f"HEAD:./{file.name}"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            known = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.split()[0]
    return {"mlflow.source.git.commit": known} if known else {}
