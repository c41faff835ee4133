"""How a rank ended, written where the launcher reads it. torchrun itself exits with 1 whatever happened."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

from shards.base.cli import run
from shards.base.files import atomic_write

Outcome = Literal["finished", "stopped", "refused", "failed"]
FOLDER = "EVENHAND_OUTCOME"  # environment variable, set by launch.entry
EXIT_CODES: dict[str, int] = {"finished": 0, "failed": 1, "refused": 2, "stopped": 75}


def run_rank(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a command that may be one of many ranks, and exit without the interpreter's shutdown.

    Process-group threads may still run. The interpreter's shutdown aborted ranks whose work was done: 3 of 12
    trainings on four ranks of a busy machine. `main` closes what must be closed.
    """
    code = 1
    try:
        run(main)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def is_supervised() -> bool:
    """Whether `launch.entry` started this process and reads its exit status."""
    return bool(os.environ.get(FOLDER))


def write_exit_status(outcome: Outcome, reason: str = "") -> int:
    """Write the outcome of this rank for the launcher; returns the exit code of this process.

    Under `launch.entry` a rank that stopped or refused exits with 0, because torchrun would start it again.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return EXIT_CODES[outcome]
    rank = int(os.environ.get("RANK", "0"))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    told = {"outcome": outcome, "reason": reason, "attempt": attempt, "ranks_here": here, "time": time.monotonic()}
    path = Path(folder) / f"rank-{rank}.json"
    try:
        atomic_write(path, json.dumps(told))
    except OSError:  # a full disk must not turn the end of a run into a crash
        return EXIT_CODES[outcome]
    return EXIT_CODES["failed"] if outcome == "failed" else 0


def all_ended(ends: dict[int, dict[str, Any]]) -> bool:
    """Whether every rank of this machine has ended and none failed; a failed rank may be started again."""
    ended = [end for end in ends.values() if end["outcome"] != "failed"]
    return bool(ended) and len(ended) == ended[0]["ranks_here"]


def read_exit_statuses(folder: str | Path) -> dict[int, dict[str, Any]]:
    """Outcomes by rank, of the latest attempt only. After an in-place restart earlier ones are stale."""
    statuses: dict[int, dict[str, Any]] = {}
    for path in Path(folder).glob("rank-*.json"):
        statuses[int(path.stem.removeprefix("rank-"))] = json.loads(path.read_text(encoding="utf-8"))
    last = max((int(item["attempt"]) for item in statuses.values()), default=0)
    return {rank: item for rank, item in sorted(statuses.items()) if int(item["attempt"]) == last}
