"""Many runs that differ in named settings, as one MLflow parent with children and one table.

    python -m launch.sweep jobs=2 out=runs/digits vary.method.name=all vary.seed=0,1,2 -- \\
        --config configs/digits.yaml recipe=common

Settings of the sweep stand before the `--`; settings of all its runs stand after it, as for `python -m pipeline.train`.
Finished runs are kept: a sweep that was stopped continues where it was. The table (results.md, results.json) has one row
for each combination without the seed: mean and spread over seeds, and the runs it comes from.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import platform
import re
import shlex
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field, PositiveInt

from pipeline import config as configuration
from pipeline.config import Config, TrackingConfig
from pipeline.tracking import journal
from pipeline.tracking.tracker import JOURNAL, NullTracker, Status, start_tracker
from shards.base import cli
from shards.base.errors import UserError
from shards.base.redact import redact
from shards.base.settings import Names, Settings, flatten

COLUMNS = ("best", "last", "mean_last10", "many", "medium", "few", "clean_f1", "seconds")
RUN_ID_SECONDS = 30.0


class SweepConfig(Settings):
    out: str = Field(min_length=1, description="folder for runs and table")
    vary: Annotated[dict[str, Names], BeforeValidator(flatten)] = Field(
        {},
        description="vary.KEY=A,B,C: a setting of the training and its values; vary.method.name=all takes every method",
    )
    jobs: PositiveInt = Field(1, description="runs at a time, each with one rank")


COMMAND = cli.Command("python -m launch.sweep", __doc__ or "", SweepConfig, passes_on="settings of the training")


def main(argv: list[str]) -> int:
    config, passed_on = COMMAND.load_own(argv)
    varied = {key: _values(key, values) for key, values in config.vary.items()}
    out = Path(config.out)
    combinations = [dict(zip(varied, values)) for values in itertools.product(*varied.values())]
    jobs = {_name(choice): choice for choice in combinations}
    if len(jobs) < len(combinations):
        raise UserError("vary names the same run twice. Give every value once.")
    arguments = {name: _arguments(passed_on, choice, out / name) for name, choice in jobs.items()}
    configs = {name: configuration.load(words) for name, words in arguments.items()}  # all mistakes before any work
    out.mkdir(parents=True, exist_ok=True)
    parent = _parent(next(iter(configs.values())), out, list(varied))
    status: Status = "KILLED"
    try:
        shared = [f"tracking.tags.sweep={out.name}", *([f"tracking.parent={parent.run_id}"] if parent.run_id else [])]
        failed = _run_all({name: words + shared for name, words in arguments.items()}, out, config.jobs)
        status = "FAILED" if failed else "FINISHED"
    finally:
        parent.finish(status)
    rows = table(out, {name: choice for name, choice in jobs.items() if name not in failed}, configs)
    if rows:
        _write(out, rows, argv)
    for name, reason in failed.items():
        print(f"{name} failed: {reason}; its log is {out / name}.log", file=sys.stderr)
    return 1 if failed else 0


def _values(key: str, values: list[str]) -> list[str]:
    if not values:
        raise UserError(f"vary.{key}: write it as vary.key=value,value, for example vary.seed=0,1,2")
    return method_names() if key == "method.name" and values == ["all"] else values


def method_names() -> list[str]:
    from pipeline.methods.options import MethodOptions

    return [str(options.model_fields["name"].default) for options in get_args(get_args(MethodOptions)[0])]


def _name(choice: dict[str, str]) -> str:
    text = "_".join(value if key == "method.name" else f"{key.split('.')[-1]}{value}" for key, value in choice.items())
    return re.sub(r"[^\w.+-]", "", text) or "run"


def _arguments(passed_on: list[str], choice: dict[str, str], folder: Path) -> list[str]:
    return [*passed_on, *(f"{key}={value}" for key, value in choice.items()), f"output={folder}"]


def _parent(config: Config, out: Path, keys: list[str]) -> NullTracker:
    """The MLflow parent run, the same one when a sweep continues. Without a server the runs only share a tag."""
    if not config.tracking.uri:
        return NullTracker()
    quiet = TrackingConfig(**{**config.tracking.model_dump(), "system_metrics": False, "run_name": f"sweep {out.name}"})
    first = next((record for _, record in journal.read(out / JOURNAL)), None)
    state = {"job": first["job"], "offset": (out / JOURNAL).stat().st_size} if first else None
    tracker = start_tracker(quiet, out, f"sweep {out.name}", {"varied": ", ".join(keys)}, {"sweep": out.name}, state)
    until = time.monotonic() + RUN_ID_SECONDS
    while tracker.run_id is None and time.monotonic() < until:
        time.sleep(0.1)
    return tracker


def _run_all(arguments: dict[str, list[str]], out: Path, jobs: int) -> dict[str, str]:
    """Why runs failed, by name. A run that finished before with these settings is not repeated."""
    failed: dict[str, str] = {}
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    with pool:
        work = {pool.submit(_train, words, str(out / name) + ".log"): name for name, words in arguments.items()}
        for done, future in enumerate(as_completed(work), 1):
            name = work[future]
            error = future.exception()
            code = None if error else future.result()
            if error or code:
                failed[name] = str(error) if error else f"exit code {code}"
            print(f"[{done}/{len(work)}] {name}{' FAILED' if name in failed else ''}", flush=True)
    return failed


def _train(words: list[str], log: str) -> int:
    """One run in this worker process. The process is used for the next run too, so torch is imported once."""
    from pipeline import train
    from pipeline.process.stop_request import kill_when_orphaned

    kill_when_orphaned()  # a run may outlive a signal to save itself, but not its sweep
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with open(log, "a", encoding="utf-8") as file, contextlib.redirect_stderr(file), contextlib.redirect_stdout(file):
        try:
            return train.main(words) or 0
        except UserError as error:
            print(f"error: {error}", file=file)
            return 2


def table(out: Path, jobs: dict[str, dict[str, str]], configs: dict[str, Config]) -> list[dict[str, Any]]:
    """One row per combination without the seed."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, choice in jobs.items():
        groups.setdefault(tuple((k, v) for k, v in choice.items() if k != "seed"), []).append(name)
    rows: list[dict[str, Any]] = []
    for key, names in groups.items():
        summaries = {
            name: json.loads((out / name / "summary.json").read_text())
            for name in names
            if (out / name / "summary.json").is_file()
        }
        row: dict[str, Any] = {**dict(key), "seeds": len(summaries)}
        for column in COLUMNS:
            values = [summary[column] for summary in summaries.values() if summary.get(column) is not None]
            if values:
                row[column] = {
                    "mean": mean(values),
                    "spread": stdev(values) if len(values) > 1 else None,
                    "values": values,
                }
        row["runs"] = {name: summary.get("run_id") for name, summary in summaries.items()}
        row["epochs"], row["recipe"] = configs[names[0]].train.epochs, configs[names[0]].recipe
        rows.append(row)
    return rows


def _write(out: Path, rows: list[dict[str, Any]], argv: list[str]) -> None:
    import torch

    made = {
        "command": redact(f"{COMMAND.prog} {shlex.join(argv)}"),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {'CUDA' if torch.cuda.is_available() else 'no GPU'}",
    }
    (out / "results.json").write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")
    keys = [key for key in rows[0] if key not in (*COLUMNS, "runs")]
    lines = [f"Made by `{made['command']}` on {made['date']}: {made['machine']}, torch {made['torch']}.", ""]
    lines += ["| " + " | ".join([*keys, *COLUMNS]) + " |", "|" + "---|" * (len(keys) + len(COLUMNS))]
    lines += [
        "| " + " | ".join([*(str(row[key]) for key in keys), *(_cell(row.get(c), c) for c in COLUMNS)]) + " |"
        for row in rows
    ]
    lines += [
        "",
        "Mean ± standard deviation over seeds. clean_f1: F1 of finding the right labels; methods that select no samples have none.",
    ]
    lines += ["", "Runs in MLflow:", ""]
    for row in rows:
        ids = ", ".join(run_id for run_id in row["runs"].values() if run_id)
        lines.append(f"- {' '.join(str(row[key]) for key in keys)}: {ids or 'none'}")
    text = "\n".join(lines) + "\n"
    (out / "results.md").write_text(text)
    print(text)


def _cell(value: dict[str, Any] | None, column: str) -> str:
    if value is None:
        return "-"
    digits = 3 if column == "clean_f1" else 0 if column == "seconds" else 2
    spread = f" ± {value['spread']:.{digits}f}" if value["spread"] is not None else ""
    return f"{value['mean']:.{digits}f}{spread}"


def start() -> None:
    cli.run(main)


if __name__ == "__main__":
    start()
