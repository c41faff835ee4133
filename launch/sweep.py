"""Many runs that differ in named settings, as one MLflow parent with children and one table.

    python -m launch.sweep --config configs/digits.yaml --out runs/digits --vary method.name=all --vary seed=0,1,2 recipe=common

Finished runs are kept: a sweep that was stopped goes on where it was. The table (results.md, results.json) has one row for
each combination without the seed: mean and spread over seeds, and the runs it comes from.
"""

from __future__ import annotations

import argparse
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
from typing import Any, get_args

from pipeline import config as configuration
from pipeline.config import Config, TrackingConfig
from pipeline.tracking.tracker import JOURNAL, NullTracker, Status, journal, start_tracker
from shards.base.cli import run
from shards.base.errors import UserError
from shards.base.redact import redact

COLUMNS = ("best", "last", "mean_last10", "many", "medium", "few", "clean_f1", "seconds")
RUN_ID_SECONDS = 30.0


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    varied = [_varied(text) for text in options.vary]
    out = Path(options.out)
    combinations = [
        dict(zip([key for key, _ in varied], values)) for values in itertools.product(*(v for _, v in varied))
    ]
    jobs = {_name(words): words for words in combinations}
    if len(jobs) < len(combinations):
        raise UserError("--vary names the same run twice. Give every value once.")
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: at least one run at a time.")
    settings = {name: _words(options, words, out / name) for name, words in jobs.items()}
    configs = {name: configuration.load(words) for name, words in settings.items()}  # all mistakes before any work
    out.mkdir(parents=True, exist_ok=True)
    parent = _parent(next(iter(configs.values())), out, [key for key, _ in varied])
    status: Status = "KILLED"
    try:
        under = [f"tracking.tags.sweep={out.name}", *([f"tracking.parent={parent.run_id}"] if parent.run_id else [])]
        failed = _run_all({name: words + under for name, words in settings.items()}, out, options.jobs)
        status = "FAILED" if failed else "FINISHED"
    finally:
        parent.finish(status)
    rows = table(out, {name: words for name, words in jobs.items() if name not in failed}, configs)
    if rows:
        _write(out, rows, argv)
    for name, why in failed.items():
        print(f"{name} failed: {why}; its log is {out / name}.log", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m launch.sweep", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", default="", help="config file of all runs")
    parser.add_argument("--out", required=True, help="folder for runs and table")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=A,B,C",
        help="a setting and its values; method.name=all takes every method",
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each with one rank")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of all runs")
    return parser


def _varied(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    if not equals or not values:
        raise UserError(f"--vary {text}: write it as --vary key=value,value, for example --vary seed=0,1,2")
    if text == "method.name=all":
        return key, method_names()
    return key, values.split(",")


def method_names() -> list[str]:
    from pipeline.methods.options import MethodOptions

    return [str(options.model_fields["name"].default) for options in get_args(get_args(MethodOptions)[0])]


def _name(words: dict[str, str]) -> str:
    text = "_".join(value if key == "method.name" else f"{key.split('.')[-1]}{value}" for key, value in words.items())
    return re.sub(r"[^\w.+-]", "", text) or "run"


def _words(options: argparse.Namespace, words: dict[str, str], folder: Path) -> list[str]:
    file = ["--config", options.config] if options.config else []
    return [*file, *options.settings, *(f"{key}={value}" for key, value in words.items()), f"output={folder}"]


def _parent(config: Config, out: Path, keys: list[str]) -> NullTracker:
    """The MLflow run the children hang under, the same when a sweep goes on; without a server they only share a tag."""
    if not config.tracking.uri:
        return NullTracker()
    quiet = TrackingConfig(**{**config.tracking.model_dump(), "system_metrics": False, "run_name": f"sweep {out.name}"})
    before = next((record for _, record in journal.read(out / JOURNAL)), None)
    state = {"job": before["job"], "offset": (out / JOURNAL).stat().st_size} if before else None
    tracker = start_tracker(quiet, out, f"sweep {out.name}", {"varied": ", ".join(keys)}, {"sweep": out.name}, state)
    until = time.monotonic() + RUN_ID_SECONDS
    while tracker.run_id is None and time.monotonic() < until:
        time.sleep(0.1)
    return tracker


def _run_all(settings: dict[str, list[str]], out: Path, jobs: int) -> dict[str, str]:
    """Reasons of the runs that failed. One that finished before, with these settings, says so and is left alone."""
    failed: dict[str, str] = {}
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))
    with pool:
        work = {pool.submit(_train, words, str(out / name) + ".log"): name for name, words in settings.items()}
        for done, future in enumerate(as_completed(work), 1):
            name = work[future]
            error = future.exception()
            code = None if error else future.result()
            if error or code:
                failed[name] = str(error) if error else f"exit code {code}"
            print(f"[{done}/{len(work)}] {name}{' FAILED' if name in failed else ''}", flush=True)
    return failed


def _train(words: list[str], log: str) -> int:
    """One run in this worker process, which stays for the next: torch is imported once."""
    from pipeline import train
    from pipeline.process.stop_request import kill_when_orphaned

    kill_when_orphaned()  # a run outlives a signal to save itself, but not its sweep
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
    for name, words in jobs.items():
        groups.setdefault(tuple((k, v) for k, v in words.items() if k != "seed"), []).append(name)
    rows: list[dict[str, Any]] = []
    for key, names in groups.items():
        found = {
            name: json.loads((out / name / "summary.json").read_text())
            for name in names
            if (out / name / "summary.json").is_file()
        }
        row: dict[str, Any] = {**dict(key), "seeds": len(found)}
        for column in COLUMNS:
            values = [summary[column] for summary in found.values() if summary.get(column) is not None]
            if values:
                row[column] = {
                    "mean": mean(values),
                    "spread": stdev(values) if len(values) > 1 else None,
                    "values": values,
                }
        row["runs"] = {name: summary.get("run_id") for name, summary in found.items()}
        row["epochs"], row["recipe"] = configs[names[0]].train.epochs, configs[names[0]].recipe
        rows.append(row)
    return rows


def _write(out: Path, rows: list[dict[str, Any]], argv: list[str]) -> None:
    import torch

    made = {
        "command": redact(f"python -m launch.sweep {shlex.join(argv)}"),
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


if __name__ == "__main__":
    run(main)
