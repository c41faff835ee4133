"""From the journal to MLflow. This is the door to mlflow: importing it takes seconds, so only threads and
commands do.

The server is asked what it already has before anything is sent again: a batch whose answer was lost, a
journal cut back by a resume and a second replay all end with every (metric, step) there exactly once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

# A short answer or none: the journal is patient, a thread stuck in a request is not. The user's own values
# win.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from sqlalchemy.exc import SQLAlchemyError

from pipeline.tracking import journal
from pipeline.tracking.journal import Record, read_cursor, write_cursor
from shards.base.errors import UserError
from shards.base.files import file_lock
from shards.base.redact import one_line, redact

logging.getLogger("urllib3").setLevel(logging.ERROR)  # every retry would be told; we tell the outage
BATCH = 500
JOB_TAG = "evenhand.job"
log = logging.getLogger(__name__)


def connect(uri: str) -> tuple[MlflowClient, str]:
    """(client, URI as mlflow shall know it). Makes the folder of an sqlite database."""
    uri = without_credentials(uri)
    database = sqlite_path(uri)
    if database is None:
        return MlflowClient(tracking_uri=uri), uri
    database.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with file_lock(Path(f"{database}.lock")):  # two jobs must not create the tables at once
        client = MlflowClient(tracking_uri=uri)
        client.search_experiments(max_results=1)
    return client, uri


@contextlib.contextmanager
def asking(uri: str) -> Iterator[MlflowClient]:
    """A client for commands that look at runs: nothing is made, and a server that does not answer is told by a
    sentence.
    """
    database = sqlite_path(uri)
    if database is not None and not database.is_file():
        raise UserError(f"There is no MLflow database {database}. Train something first, or give uri=.")
    try:
        client, clean = connect(uri)
        mlflow.set_tracking_uri(clean)  # downloads look there, whatever the client was told
        yield client
    except (mlflow.MlflowException, SQLAlchemyError, OSError) as error:
        raise UserError(f"MLflow at {redact(uri)}: {one_line(error)}. Check uri= and the server.") from error


def without_credentials(uri: str) -> str:
    """The URI of a server; its credentials move where mlflow looks for them and hides them. Those of a database
    (postgresql://) have no other place than the URI.
    """
    parts = urlsplit(uri)
    if not parts.username or parts.scheme not in ("http", "https"):
        return uri
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username)
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password or "")
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None


def experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    """The experiment, made if need be; a local database keeps its artifacts in a folder beside it."""
    found = client.get_experiment_by_name(name)
    if found is None:
        database = sqlite_path(uri)
        location = (database.parent / "mlartifacts").as_uri() if database else None
        try:
            kind = {"mlflow.experimentKind": "custom_model_development"}  # the UI opens with runs and charts
            return client.create_experiment(name, location, kind)
        except mlflow.MlflowException:
            found = client.get_experiment_by_name(name)  # another job was quicker
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise UserError(f"The MLflow experiment '{name}' was deleted; restore it or choose another tracking.experiment")
    return found.experiment_id


class Shipper:
    """Ships one journal to one server and remembers, beside the journal, how far it got."""

    def __init__(self, uri: str, path: Path) -> None:
        self.client, self.uri = connect(uri)
        self.path, self.folder = path, path.parent
        self.cursor = read_cursor(path)
        server = hashlib.sha256(redact(self.uri).encode()).hexdigest()[:16]
        if self.cursor.get("server") != server:  # a server that has seen nothing of this journal
            self.cursor = {"server": server, "offset": 0, "deferred": []}
        self.run_id = ""  # empty: not attached
        self.keys: set[str] = set()  # metrics the server has points of
        self.seen: dict[str, set[int]] = {}  # their steps, fetched when first needed
        self.metrics: list[Metric] = []
        self.shipped = 0  # records, in the life of this object

    def ship(self, last: bool = False) -> None:
        """Everything that is in the journal now; raises where it gets stuck, having noted how far it came."""
        try:
            if not self.run_id or last:
                self._attach()
                self._retry_deferred()
            reached = self.cursor["offset"]
            for end, record in journal.read(self.path, self.cursor["offset"]):
                self._take(record)
                self.shipped += 1
                if record["kind"] != "metrics" or len(self.metrics) >= BATCH:
                    self._flush(end)
                reached = end
            self._flush(reached)
        except Exception:
            self.run_id, self.metrics = "", []  # ask again what the server has
            raise

    def _flush(self, offset: int) -> None:
        if not self.metrics and offset == self.cursor["offset"]:
            return
        for first in range(0, len(self.metrics), BATCH):
            batch = self.metrics[first : first + BATCH]
            self.client.log_batch(self.run_id, metrics=batch, synchronous=True)
        self.metrics = []
        self.cursor["offset"] = offset
        write_cursor(self.path, self.cursor)

    def _take(self, record: Record) -> None:
        kind = record["kind"]
        if kind == "metrics":
            self._collect(record)
        elif kind == "start":
            self._flush(self.cursor["offset"])
            self._describe(record)
        elif kind == "end":
            self._flush(self.cursor["offset"])
            self.client.set_terminated(self.run_id, record["status"], end_time=record["time"])
        else:
            self._try(record)

    def _collect(self, record: Record) -> None:
        for key, value in record["values"].items():
            key = clean_key(key)
            if key not in self.seen:
                history = self.client.get_metric_history(self.run_id, key) if key in self.keys else []
                self.seen[key] = {point.step for point in history}
            if record["step"] not in self.seen[key]:
                self.seen[key].add(record["step"])
                self.metrics.append(Metric(key, value, record["time"], record["step"]))

    # -- the run -----------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Find this job's run by its tag, or make it."""
        start = next((r for _, r in journal.read(self.path) if r["kind"] == "start"), None)
        if start is None:
            raise UserError(f"{self.path} does not begin with the start of a run")
        experiment = experiment_id(self.client, self.uri, start["experiment"])
        found = self.client.search_runs([experiment], f"tags.`{JOB_TAG}` = '{start['job']}'", max_results=10)
        if found:
            before = self.cursor.get("run_id")
            run = min(found, key=lambda one: (one.info.run_id != before, one.info.run_id))
            for other in found:  # a slow server may have made a run after we had given up waiting for it
                if other is not run:
                    self.client.delete_run(other.info.run_id)
        else:
            tags = {clean_key(key): value for key, value in start["tags"].items()} | {JOB_TAG: start["job"]}
            run = self.client.create_run(experiment, start["time"], tags, start["name"])
        if self.cursor.get("run_id") != run.info.run_id:
            self.cursor |= {"run_id": run.info.run_id, "offset": 0, "deferred": []}
        self.run_id = run.info.run_id
        self.keys, self.seen = set(run.data.metrics), {}

    def _describe(self, start: Record) -> None:
        """Params and tags of a start. MLflow's params are final: what a resume changed is told by a tag."""
        known = self.client.get_run(self.run_id).data.params
        params, tags = [], [RunTag(clean_key(key), str(value)[:5000]) for key, value in start["tags"].items()]
        for key, value in start["params"].items():
            key = clean_key(key)
            if key not in known:
                params.append(Param(key, value[:6000]))
            elif known[key] != value[:6000]:
                tags.append(RunTag(f"resumed_with.{key}", value[:5000]))
        for first in range(0, max(len(params), len(tags)), 100):
            few = slice(first, first + 100)
            self.client.log_batch(self.run_id, params=params[few], tags=tags[few], synchronous=True)
        self.client.update_run(self.run_id, status="RUNNING")

    # -- what is more than a number ----------------------------------------------------------------

    def _try(self, record: Record) -> None:
        """An artifact that fails must not hold up the metrics behind it: it is put aside and tried again."""
        try:
            self._send(record)
        except Exception as error:
            log.warning(
                "MLflow: %s %s waits: %s",
                record["kind"],
                record.get("path", ""),
                one_line(error),
            )
            self.cursor["deferred"].append(record)
            self.shipped -= 1

    def _retry_deferred(self) -> None:
        waiting, self.cursor["deferred"] = self.cursor["deferred"], []
        for record in waiting:
            self.shipped += 1
            self._try(record)
        if waiting:
            write_cursor(self.path, self.cursor)

    def _send(self, record: Record) -> None:
        if record["kind"] == "dataset":
            self.client.log_inputs(self.run_id, [dataset_input(record["facts"])])
            return
        path = self.folder / record["path"]
        if not path.exists():
            log.warning("MLflow: %s is gone and cannot be uploaded.", path)
        elif record["kind"] == "model":
            from pipeline.tracking.mlflow_model import log_model

            log_model(self.uri, self.run_id, path, record["register_as"])
        elif path.is_dir():
            self.client.log_artifacts(self.run_id, str(path), record["to"] or path.name)
        else:
            self.client.log_artifact(self.run_id, str(path), record["to"] or None)


def clean_key(key: str) -> str:
    """The key with what MLflow refuses in a name replaced."""
    return re.sub(r"/+", "/", re.sub(r"[^\w\-. :/]", "_", key)).strip("/. ")[:250] or "_"


def dataset_input(facts: dict[str, Any]) -> DatasetInput:
    rest = {key: value for key, value in facts.items() if key not in ("name", "digest", "source")}
    profile = json.dumps(rest, default=str)
    source = json.dumps({"url": str(facts.get("source", ""))})
    dataset = Dataset(
        name=str(facts.get("name", "data")),
        digest=str(facts.get("digest", ""))[:36],
        source_type="http" if "://" in source else "local",
        source=source,
        profile=profile if len(profile) < 16_000 else "{}",
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])
