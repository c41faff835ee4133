"""Start training under torchrun, pass signals on, and end with an exit code that says what happened.

    python -m launch.entry --config configs/digits.yaml train.epochs=3
    python -m launch.entry --nnodes=2 --nproc-per-node=8 ... -- --config configs/digits.yaml

torchrun exits with 1 whatever its workers did. Each rank records how it ended; this entry reads that and exits with

    0   finished
    2   the configuration or the data is wrong: do not try again before it is corrected
    75  stopped on request; the same command continues where it stopped
    1   anything else; the same command continues from the last checkpoint

Settings are checked before torchrun starts, so a typing mistake answers at once. torch is not imported here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline import config
from pipeline.process import exit_status, stop_request
from pipeline.process.diagnose import RESUME
from shards.base import cli
from shards.base.errors import UserError

WORKER = ("-m", "pipeline.train")
SHUTDOWN_SECONDS = 100  # for saving after a signal; torchrun's own 30 may be short for a large model on a slow store
REFUSED_GRACE = 1.0  # seconds for the other ranks to end by themselves after one refused its settings or data
ENDED_GRACE = 15.0  # seconds for torchrun to end after all its ranks have recorded their end
KILL_GRACE = 5.0  # seconds between SIGTERM and SIGKILL to torchrun
HELP = """usage: python -m launch.entry [train options]
       python -m launch.entry [torchrun options] -- [train options]

Starts training under torchrun: on every GPU of this machine, or as one process without GPUs. torchrun's own
options (torchrun --help) or its PET_ environment variables set the rest, such as several machines.
Train options are those of python -m pipeline.train (--help there lists them).

Exit codes: 0 finished; 2 the configuration or the data is wrong, do not try again before it is corrected;
75 stopped on request (SIGTERM, SIGINT, SIGUSR1, SIGHUP, deadline, stop file), the same command continues; 1
anything else, the same command continues from the last checkpoint.
"""


def torchrun_options(given: list[str], env: Mapping[str, str]) -> list[str]:
    """The options given, and defaults for what is set neither by them nor by PET_ variables (from TrainJob)."""

    def is_set(*names: str) -> bool:
        words = {word.partition("=")[0].lstrip("-").replace("_", "-") for word in given}
        return any(name in words or f"PET_{name.replace('-', '_').upper()}" in env for name in names)

    out = list(given)
    if not is_set("nproc-per-node"):
        out.append(f"--nproc-per-node={'gpu' if has_gpu() else 1}")
    if not is_set("standalone", "nnodes", "rdzv-endpoint", "rdzv-backend", "master-addr", "master-port", "node-rank"):
        # A free port keeps two jobs on one machine apart. An address: the name of a container may not resolve.
        out += ["--standalone", "--local-addr=127.0.0.1"]
    if not is_set("shutdown-timeout") and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in env:
        out.append(f"--shutdown-timeout={SHUTDOWN_SECONDS}")
    if not is_set("signals-to-handle"):
        out.append("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    return out


def has_gpu() -> bool:
    """Whether there is a CUDA or ROCm device. Does not import torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


class Supervisor:
    """Starts torchrun, forwards signals to it, and reads what its ranks recorded."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.stop_signal: str | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        with tempfile.TemporaryDirectory(prefix="evenhand-") as folder:
            before = {number: signal.signal(number, self._forward) for number in _FORWARDED}
            try:
                env = {**os.environ, exit_status.FOLDER: folder, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
                # In a session of its own: Ctrl-C in a terminal reaches torchrun once, through us.
                self.process = subprocess.Popen(
                    self.command, env=env, start_new_session=True, preexec_fn=stop_request.kill_when_orphaned
                )
                if self.stop_signal:  # received before torchrun was started
                    self.process.terminate()
                code = self._wait(self.process, folder)
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
            return self._exit_code(code, exit_status.read_exit_statuses(folder))

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """The first signal goes to torchrun and from there to the ranks. A second one would break its shutdown, except
        that a second Ctrl-C kills it."""
        if self.process is not None and self.stop_signal is None:
            self.process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)
        elif self.process is not None and number == signal.SIGINT:
            self.process.kill()
        self.stop_signal = self.stop_signal or signal.Signals(number).name

    def _wait(self, process: subprocess.Popen[bytes], folder: str) -> int:
        """Wait for torchrun, with a limit: after a refusal it would restart the ranks with the same settings, and when
        its ranks have ended it waits five minutes for ranks of a machine that may be gone."""
        end_at, terminated = float("inf"), False
        while True:
            try:
                return process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                ends, now = exit_status.read_exit_statuses(folder), time.monotonic()
                if any(end["outcome"] == "refused" for end in ends.values()):
                    end_at = min(end_at, now + REFUSED_GRACE)
                elif exit_status.all_ended(ends):
                    end_at = min(end_at, now + ENDED_GRACE)
                if now > end_at and not terminated:
                    process.terminate()
                    terminated = True
                elif now > end_at + KILL_GRACE and exit_status.all_ended(ends):
                    process.kill()  # it handles no signal while it waits for other machines

    def _exit_code(self, code: int, ends: dict[int, dict[str, Any]]) -> int:
        kinds = {end["outcome"] for end in ends.values()}
        if "refused" in kinds:
            return _report(ends, "refused")
        if "failed" in kinds:
            return _report(ends, "failed")
        if "stopped" in kinds:
            return _report(ends, "stopped")
        if code == 0 or exit_status.all_ended(ends):
            return 0
        if self.stop_signal:
            print(f"stopped: {self.stop_signal} was received before the ranks could save. {RESUME}", file=sys.stderr)
            return exit_status.EXIT_CODES["stopped"]
        print(f"failed: a rank ended without recording why, see its output above. {RESUME}", file=sys.stderr)
        return exit_status.EXIT_CODES["failed"]


_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def _report(ends: dict[int, dict[str, Any]], kind: str) -> int:
    """Print why. Ranks stop and refuse together; of those that failed, the later ones may only have lost the first."""
    those = [item for item in ends.items() if item[1]["outcome"] == kind]
    rank, end = min(those, key=lambda item: item[1]["time"]) if kind == "failed" else those[0]
    print(f"{kind}: rank {rank}: {end['reason']}" if end["reason"] else f"{kind}.", file=sys.stderr)
    return exit_status.EXIT_CODES[kind]


def launch(options: list[str], worker: list[str]) -> int:
    """Run a worker command under torchrun; returns the exit code of the table above."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", *torchrun_options(options, os.environ)]
    return Supervisor([*torchrun, *worker]).run()


def main(argv: list[str], check: Callable[[list[str]], object] = config.load) -> int:
    options, words = cli.split_passed_on(argv)
    if words is None:  # without a `--` everything is for the training
        options, words = [], argv
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    try:
        check(words)
    except UserError as error:
        if not options and "There is no option" in str(error):
            example = "python -m launch.entry --nproc-per-node=2 -- key=value"
            raise UserError(f"{error}\nOptions of torchrun stand before a `--`: {example}") from None
        raise
    return launch(options, [*WORKER, *words])


if __name__ == "__main__":
    cli.run(main)
