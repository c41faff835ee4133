"""Many runs that differ in named settings, as one MLflow parent with children and one table.

    python -m launch.sweep jobs=2 out=runs/digits vary.method.name=all vary.seed=0,1,2 -- \\
        --config configs/digits.yaml recipe=common

Settings of the sweep stand before the `--`; settings of all its runs stand after it, as for `python -m pipeline.train`.
Finished runs are kept: a sweep that was stopped continues where it was. The table (results.md, results.json) has one row
for each combination without the seed: mean and spread over seeds, and the runs it comes from.

rows=FILE.json keeps finished runs in a file that can go to another machine: a run whose settings and shards equal those of a
run there is taken from it, and a run that finishes is added to it. The table, of all runs in the file, lies beside it.

vary.draw=0,1,2 draws the bias of the data anew with every seed: seed=K and shards.bias_seed=K. A ranking on one draw may be
luck; mean and spread are then over draws.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Annotated, get_args

from pydantic import BeforeValidator, Field, PositiveInt

from launch.sweep_results import Record, add_run, find_finished, read_runs, record_of, shown_command, write_results
from pipeline import config as configuration
from pipeline.config import Config, TrackingConfig
from pipeline.tracking import journal
from pipeline.tracking.tracker import DRAW, JOURNAL, VARIED, NullTracker, Status, start_tracker
from shards.base import cli
from shards.base.errors import UserError
from shards.base.redact import redact
from shards.base.settings import Names, Settings, flatten

RUN_ID_SECONDS = 30.0
NAMED = ("method.name", "seed", DRAW)  # stand in the name of every run
DRAWN = ("seed", "shards.bias_seed")  # what vary.draw sets
NICENESS = 10  # runs give way to other work


class SweepConfig(Settings):
    out: str = Field(min_length=1, description="folder for runs and table")
    vary: Annotated[dict[str, Names], BeforeValidator(flatten)] = Field(
        {},
        description="vary.KEY=A,B,C: a setting of the training and its values; vary.method.name=all takes every method, "
        "vary.draw=0,1,2 varies seed and shards.bias_seed together",
    )
    jobs: PositiveInt = Field(1, description="runs at a time, each with one rank and its share of the cores")
    rows: str = Field(
        "",
        pattern=r"^$|\.json$",
        description="file (.json) of finished runs to take from and add to; empty: OUT/results.json, of this sweep",
    )


COMMAND = cli.Command("python -m launch.sweep", __doc__ or "", SweepConfig, passes_on="settings of the training")


def main(argv: list[str]) -> int:
    config, passed_on = COMMAND.load_own(argv)
    varied = {key: _values(key, values) for key, values in config.vary.items()}
    if DRAW in varied and (twice := next((key for key in DRAWN if key in varied), "")):
        raise UserError(f"vary.draw sets {twice} already. Leave vary.{twice} out, or vary.draw.")
    out = Path(config.out)
    combinations = [dict(zip(varied, values)) for values in itertools.product(*varied.values())]
    jobs = {_name(choice): choice for choice in combinations}
    if len(jobs) < len(combinations):
        raise UserError("vary names the same run twice. Give every value once.")
    arguments = {name: _arguments(passed_on, choice, out / name) for name, choice in jobs.items()}
    configs = {name: configuration.load(words) for name, words in arguments.items()}  # all mistakes before any work
    if DRAW in varied and (url := next((c.shards.url for c in configs.values() if c.shards.url), "")):
        raise UserError(
            f"vary.draw draws the bias of the data anew, but shards.url={redact(url)} names finished shards. Name their "
            "source instead (shards.source=...), or vary.seed."
        )
    command, file = shown_command(COMMAND.prog, argv), Path(config.rows) if config.rows else out / "results.json"
    taken = _taken(file, jobs, configs) if config.rows else set()
    out.mkdir(parents=True, exist_ok=True)
    todo = {name: choice for name, choice in jobs.items() if name not in taken}

    def finished(name: str) -> Record | None:
        return record_of(name, jobs[name], configs[name], out / name)

    def keep(name: str) -> None:
        if config.rows and (record := finished(name)):
            add_run(file, record, command)

    failed = _run_under_a_parent(todo, arguments, configs, config, list(varied), keep)
    records = [record for name in jobs if name not in failed and (record := finished(name))] if not config.rows else []
    if records:
        write_results(file, records, command)
    table = file.with_suffix(".md")
    if (records or config.rows) and table.is_file():
        print(table.read_text(encoding="utf-8"))
    for name, reason in failed.items():
        print(f"{name} failed: {reason}; its log is {out / name}.log", file=sys.stderr)
    return 1 if failed else 0


def _taken(file: Path, jobs: dict[str, dict[str, str]], configs: dict[str, Config]) -> set[str]:
    """The runs that stand in the file already."""
    records = read_runs(file)
    taken = {name for name, config in configs.items() if find_finished(records, jobs[name], config)}
    for name in sorted(taken):
        print(f"[in {file}] {name}", flush=True)
    return taken


def _run_under_a_parent(
    todo: dict[str, dict[str, str]],
    arguments: dict[str, list[str]],
    configs: dict[str, Config],
    config: SweepConfig,
    varied: list[str],
    keep: Callable[[str], None],
) -> dict[str, str]:
    """Train what is to do; returns why runs failed, by name."""
    if not todo:
        return {}
    out = Path(config.out)
    parent = _parent(configs[next(iter(todo))], out, varied)
    status: Status = "KILLED"
    try:
        shared = [f"tracking.tags.sweep={out.name}", *([f"tracking.parent={parent.run_id}"] if parent.run_id else [])]
        words = {name: [*arguments[name], *shared, *_varied(choice)] for name, choice in todo.items()}
        failed = _run_all(words, out, config.jobs, keep)
        status = "FAILED" if failed else "FINISHED"
    finally:
        parent.finish(status)
    return failed


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


def _varied(choice: dict[str, str]) -> list[str]:
    """What the runs of the sweep differ in besides method, seed and draw, for their names in MLflow; and the draw."""
    text = " ".join(f"{key.split('.')[-1]}={value}" for key, value in choice.items() if key not in NAMED)
    drawn = [f"tracking.tags.{DRAW}={choice[DRAW]}"] if DRAW in choice else []
    return drawn + ([f"tracking.tags.{VARIED}={text}"] if text else [])


def _arguments(passed_on: list[str], choice: dict[str, str], folder: Path) -> list[str]:
    chosen = {k: value for key, value in choice.items() for k in (DRAWN if key == DRAW else (key,))}
    return [*passed_on, *(f"{key}={value}" for key, value in chosen.items()), f"output={folder}"]


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


def _run_all(arguments: dict[str, list[str]], out: Path, jobs: int, keep: Callable[[str], None]) -> dict[str, str]:
    """Why runs failed, by name. A run that finished before with these settings is not repeated."""
    failed: dict[str, str] = {}
    context = multiprocessing.get_context("spawn")
    shares = context.Queue()
    for share in shares_of_cores(sorted(os.sched_getaffinity(0)), jobs):
        shares.put(share)
    with ProcessPoolExecutor(jobs, context, _give_way, (shares, NICENESS)) as pool:
        work = {pool.submit(_train, words, str(out / name) + ".log"): name for name, words in arguments.items()}
        for done, future in enumerate(as_completed(work), 1):
            name = work[future]
            error = future.exception()
            code = None if error else future.result()
            if error or code:
                failed[name] = str(error) if error else f"exit code {code}"
            else:
                keep(name)
            print(f"[{done}/{len(work)}] {name}{' FAILED' if name in failed else ''}", flush=True)
    return failed


def shares_of_cores(cores: list[int], jobs: int) -> list[list[int]]:
    """The cores of each job: runs that share cores make each other wait. With fewer cores than jobs each has one."""
    ends = [len(cores) * job // jobs for job in range(jobs + 1)]
    return [cores[a:b] or [cores[job % len(cores)]] for job, (a, b) in enumerate(itertools.pairwise(ends))]


def _give_way(shares: Queue[list[int]], niceness: int) -> None:
    """At the start of a worker process: its cores, and a low priority."""
    os.sched_setaffinity(0, shares.get())
    os.nice(niceness)


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


def start() -> None:
    cli.run(main)


if __name__ == "__main__":
    start()
