"""Sends the journal to MLflow. Importing mlflow takes seconds, so only threads and commands import this module.

Before anything is sent again, the server is asked what it has. A batch whose answer was lost, a journal cut by a
resume and a second replay all end with every (metric, step) there exactly once.
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

# Short timeouts: the journal can wait, a thread that hangs in a request cannot stop. The user's own values win.
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
from pipeline.tracking.colors import free_color
from pipeline.tracking.journal import Record, read_cursor, write_cursor
from shards.base.errors import UserError
from shards.base.files import file_lock
from shards.base.redact import one_line, redact

logging.getLogger("urllib3").setLevel(logging.ERROR)  # it logs every retry; the tracker logs the outage once
BATCH = 500
JOB_TAG, COLOR_TAG = "evenhand.job", "mlflow.runColor"
log = logging.getLogger(__name__)


def create_client(uri: str) -> tuple[MlflowClient, str]:
    """(client, URI without credentials). Creates the folder of an sqlite database."""
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
def mlflow_client(uri: str) -> Iterator[MlflowClient]:
    """A client for commands that read runs: creates nothing; a server that does not answer is a UserError."""
    database = sqlite_path(uri)
    if database is not None and not database.is_file():
        raise UserError(f"There is no MLflow database {database}. Train something first, or give uri=.")
    try:
        client, clean = create_client(uri)
        use_server(clean)  # downloads use this one, not the client's
        yield client
    except (mlflow.MlflowException, SQLAlchemyError, OSError) as error:
        raise UserError(f"MLflow at {redact(uri)}: {one_line(error)}. Check uri= and the server.") from error


def use_server(uri: str) -> None:
    """Make it the default server of this process. mlflow also writes it into the environment, where a later command
    of the same process would take it for a choice of the user; that is undone.
    """
    before = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(uri)
    if before is None:
        os.environ.pop("MLFLOW_TRACKING_URI", None)
    else:
        os.environ["MLFLOW_TRACKING_URI"] = before


def without_credentials(uri: str) -> str:
    """The URI of a server; its credentials move to the environment variables mlflow reads. Those of a database
    (postgresql://) stay in the URI, because they have no other place.
    """
    parts = urlsplit(uri)
    if not parts.username or parts.scheme not in ("http", "https"):
        return uri
    os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(parts.username)
    os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(parts.password or "")
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def sqlite_path(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None


def get_or_create_experiment(client: MlflowClient, uri: str, name: str) -> str:
    """The id of the experiment, created if missing; a local database has its artifacts in a folder beside it."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        database = sqlite_path(uri)
        location = (database.parent / "mlartifacts").as_uri() if database else None
        try:
            kind = {"mlflow.experimentKind": "custom_model_development"}  # the UI opens with runs and charts
            return client.create_experiment(name, location, kind)
        except mlflow.MlflowException:
            experiment = client.get_experiment_by_name(name)  # another job created it first
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        raise UserError(f"The MLflow experiment '{name}' was deleted; restore it or choose another tracking.experiment")
    return experiment.experiment_id


class JournalSync:
    """Sends one journal to one server and stores, beside the journal, how far it came."""

    def __init__(self, uri: str, path: Path) -> None:
        self.client, self.uri = create_client(uri)
        self.path, self.folder = path, path.parent
        self.cursor = read_cursor(path)
        server = hashlib.sha256(redact(self.uri).encode()).hexdigest()[:16]
        if self.cursor.get("server") != server:  # this server has nothing of the journal yet
            self.cursor = {"server": server, "offset": 0, "deferred": []}
        self.run_id = ""  # empty: not known yet
        self.experiment_id = ""
        self.known_metrics: set[str] = set()  # metrics the server has
        self.known_steps: dict[str, set[int]] = {}  # their steps, fetched when first needed
        self.queued: list[Metric] = []
        self.sent = 0  # records sent by this object

    def sync(self, last: bool = False) -> None:
        """Send everything that is in the journal now. On an error the position reached is stored, then it is raised."""
        try:
            if not self.run_id or last:
                self._find_or_create_run()
                self._retry_deferred()
            reached = self.cursor["offset"]
            for end, record in journal.read(self.path, self.cursor["offset"]):
                self._handle(record)
                self.sent += 1
                if record["kind"] != "metrics" or len(self.queued) >= BATCH:
                    self._flush(end)
                reached = end
            self._flush(reached)
        except Exception:
            self.run_id, self.queued = "", []  # ask again what the server has
            raise

    def _flush(self, offset: int) -> None:
        if not self.queued and offset == self.cursor["offset"]:
            return
        for first in range(0, len(self.queued), BATCH):
            batch = self.queued[first : first + BATCH]
            self.client.log_batch(self.run_id, metrics=batch, synchronous=True)
        self.queued = []
        self.cursor["offset"] = offset
        write_cursor(self.path, self.cursor)

    def _handle(self, record: Record) -> None:
        kind = record["kind"]
        if kind == "metrics":
            self._queue_metrics(record)
        elif kind == "start":
            self._flush(self.cursor["offset"])
            self._log_params_and_tags(record)
        elif kind == "end":
            self._flush(self.cursor["offset"])
            self.client.set_terminated(self.run_id, record["status"], end_time=record["time"])
        else:
            self._send_or_defer(record)

    def _queue_metrics(self, record: Record) -> None:
        for key, value in record["values"].items():
            key = clean_key(key)
            if key not in self.known_steps:
                history = self.client.get_metric_history(self.run_id, key) if key in self.known_metrics else []
                self.known_steps[key] = {point.step for point in history}
            if record["step"] not in self.known_steps[key]:
                self.known_steps[key].add(record["step"])
                self.queued.append(Metric(key, value, record["time"], record["step"]))

    # -- the run -----------------------------------------------------------------------------------

    def _find_or_create_run(self) -> None:
        """Find this job's run by its tag, or create it."""
        start = next((r for _, r in journal.read(self.path) if r["kind"] == "start"), None)
        if start is None:
            raise UserError(f"{self.path} does not begin with the start of a run")
        experiment = get_or_create_experiment(self.client, self.uri, start["experiment"])
        runs = self.client.search_runs([experiment], f"tags.`{JOB_TAG}` = '{start['job']}'", max_results=10)
        if runs:
            before = self.cursor.get("run_id")
            run = min(runs, key=lambda one: (one.info.run_id != before, one.info.run_id))
            for other in runs:  # a slow server may have created a run after our request timed out
                if other is not run:
                    self.client.delete_run(other.info.run_id)
        else:
            tags = {clean_key(key): value for key, value in start["tags"].items()} | {JOB_TAG: start["job"]}
            if COLOR_TAG in tags:  # runs of one method would be lines of one colour
                others = self.client.search_runs([experiment], max_results=100)
                tags[COLOR_TAG] = free_color(tags[COLOR_TAG], [one.data.tags.get(COLOR_TAG, "") for one in others])
            run = self.client.create_run(experiment, start["time"], tags, start["name"])
        if self.cursor.get("run_id") != run.info.run_id:
            self.cursor |= {"run_id": run.info.run_id, "offset": 0, "deferred": []}
        self.run_id, self.experiment_id = run.info.run_id, experiment
        self.known_metrics, self.known_steps = set(run.data.metrics), {}

    def _log_params_and_tags(self, start: Record) -> None:
        """Params and tags of a start record. MLflow's params are final: what a resume changed becomes a tag."""
        known = self.client.get_run(self.run_id).data.params
        tags = [RunTag(clean_key(key), str(value)[:5000]) for key, value in start["tags"].items() if key != COLOR_TAG]
        params = []
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

    # -- artifacts, models, datasets ---------------------------------------------------------------

    def _send_or_defer(self, record: Record) -> None:
        """An artifact that fails must not block the metrics after it: it is deferred and tried again."""
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
            self.sent -= 1

    def _retry_deferred(self) -> None:
        waiting, self.cursor["deferred"] = self.cursor["deferred"], []
        for record in waiting:
            self.sent += 1
            self._send_or_defer(record)
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
            if record.get("table"):  # as mlflow.log_table marks it
                shown = json.dumps([{"path": path.name, "type": "table"}])
                self.client.set_tag(self.run_id, "mlflow.loggedArtifacts", shown)


def clean_key(key: str) -> str:
    """The key with characters that MLflow refuses replaced."""
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
