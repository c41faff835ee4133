"""`python -m pipeline.tracking replay FOLDER [uri=URI]`: send to MLflow what a dead job left in its journal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydantic import Field

from pipeline.config import tracking_environment
from pipeline.tracking import journal
from pipeline.tracking.journal import Journal, lock, pending
from pipeline.tracking.tracker import JOURNAL, now
from shards.base import cli, settings
from shards.base.errors import UserError
from shards.base.files import atomic_write
from shards.base.redact import one_line, redact
from shards.base.settings import Settings

PROG = "python -m pipeline.tracking replay"


class ReplayConfig(Settings):
    folder: str = Field(min_length=1, description="output folder of the run")
    uri: str = Field("", description="MLflow tracking URI; empty = the run's own setting, then MLFLOW_TRACKING_URI")


COMMAND = cli.Command(
    PROG, "Send to MLflow what a job left in its journal when the server was away.", ReplayConfig, words=("folder",)
)


def replay(folder: Path, uri: str) -> int:
    """Send what a dead job left in its folder. A run without an end is marked FAILED. Returns the number of records
    sent.
    """
    from pipeline.tracking.mlflow_sync import JournalSync

    paths = sorted(folder.glob("journal*.jsonl"))
    if not paths:
        raise UserError(f"There is no journal in {folder}. Give the output folder of a run.")
    sent = left = 0
    for path in paths:
        with lock(path) as mine:
            if not mine:
                raise UserError(f"{path} is in use: its job is still running, or another replay sends it.")
            kind = None
            for _, record in journal.read(path):
                kind = record["kind"]
            if kind != "end":
                ending = Journal(path)
                finished = path.name == JOURNAL and (folder / "summary.json").is_file()
                ending.append({"kind": "end", "time": now(), "status": "FINISHED" if finished else "FAILED"})
                ending.close()
            try:
                sync = JournalSync(uri, path)
                sync.sync(last=True)
            except Exception as error:
                raise UserError(
                    f"MLflow at {redact(uri)}: {one_line(error)}. {path} is kept; try again later."
                ) from error
            sent += sync.sent
            left += pending(path)
            if path.name == JOURNAL:
                _note_run(folder / "summary.json", sync.run_id)
    if left:
        raise UserError(
            f"{left} artifacts were not taken by MLflow at {redact(uri)}; the rest is there. Try again later."
        )
    return sent


def _note_run(file: Path, run_id: str) -> None:
    """Write the run id into the summary: a run that ended without a server does not have it."""
    summary = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if "run_id" in summary and not summary["run_id"]:
        atomic_write(file, json.dumps(summary | {"run_id": run_id}, indent=1) + "\n")


def _uri_of(folder: Path) -> str:
    config = folder / "config.yaml"
    uri: str = settings.read_yaml(config).get("tracking", {}).get("uri", "") if config.is_file() else ""
    if not uri or "***" in uri:
        uri = tracking_environment().get("uri", "")
    if not uri:
        raise UserError(f"{config} names no MLflow server. Add one, for example uri=sqlite:///runs/mlflow.db")
    return uri


def main(argv: list[str]) -> int:
    if argv[:1] != ["replay"] and not {"-h", "--help"} & set(argv):
        raise UserError(f"Write: {cli.command_name(PROG)} FOLDER [uri=URI]")
    return replay_command(argv[1:] if argv[0] == "replay" else argv)


def replay_command(argv: list[str]) -> int:
    config = COMMAND.load(argv)
    folder = Path(config.folder)
    uri = config.uri or _uri_of(folder)
    count = replay(folder, uri)
    print(f"{count} records sent to {redact(uri)}." if count else "Nothing was left to send.", file=sys.stderr)
    return 0


def start() -> None:
    cli.run(replay_command)


if __name__ == "__main__":
    cli.run(main)
