"""The exit code of the entry says what happened. Real torchrun, small workers without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch import entry
from pipeline.process import exit_status

WORKER = """
import os, signal, sys, time
from pipeline.process.exit_status import write_exit_status
from pipeline.process.stop_request import StopRequest, die_with_parent

die_with_parent()
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
stop = StopRequest()
with open(sys.argv[2], "a") as out:
    out.write(f"{rank} {attempt} {os.getpid()}\\n")
what = sys.argv[1]
if what == "wait":
    while not stop.reason:
        time.sleep(0.02)
    sys.exit(write_exit_status("stopped", stop.reason))
if what == "hang":
    time.sleep(60)
if what == "die" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if what == "die":
    while not stop.reason:
        time.sleep(0.02)
    sys.exit(1)
if what == "refuse" or what == "one refuses" and rank == 1:
    sys.exit(write_exit_status("refused", "the shards have 10 classes, the checkpoint 7."))
if what == "one refuses":
    while not stop.reason:
        time.sleep(0.02)
    sys.exit(write_exit_status("failed", "connection closed by peer"))
if what == "recover" and attempt == 0:
    sys.exit(write_exit_status("failed", "a passing trouble"))
if what == "deadline":
    sys.exit(write_exit_status("stopped", "the deadline of 5 minutes has passed"))
if what == "raise":
    raise RuntimeError("boom")
sys.exit(write_exit_status("finished"))
"""


class Job:
    """An entry in a process of its own, as a container would start it."""

    def __init__(self, folder: Path, what: str, *options: str) -> None:
        worker = folder / "worker.py"
        worker.write_text(WORKER)
        self.log = folder / "started"
        words = [*options, "--nproc-per-node=2", "--monitor-interval=0.05"]
        code = f"import sys; from launch.entry import launch; sys.exit(launch({words!r}, sys.argv[1:]))"
        env = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", code, str(worker), what, str(self.log)]
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)

    def workers(self, count: int = 2) -> list[int]:
        """Process ids, once all have started."""
        until = time.monotonic() + 60
        while not self.log.exists() or len(self.log.read_text().splitlines()) < count:
            assert time.monotonic() < until
            time.sleep(0.05)
        return [int(line.split()[2]) for line in self.log.read_text().splitlines()]

    def end(self) -> tuple[int, str]:
        said = self.process.communicate(timeout=60)[1]
        return self.process.returncode, said


pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("what", "options", "code", "said"),
    [
        ("refuse", ["--max-restarts=3"], 2, "refused: rank 0: the shards have 10 classes"),
        ("one refuses", ["--max-restarts=3"], 2, "refused: rank 1: the shards have 10 classes"),
        ("deadline", ["--max-restarts=3"], 75, "stopped: rank 0: the deadline"),
        ("die", [], 1, "failed: a rank ended without recording why"),
        ("recover", ["--max-restarts=1"], 0, ""),
    ],
)
def test_the_exit_code_says_how_the_ranks_ended(
    tmp_path: Path, what: str, options: list[str], code: int, said: str
) -> None:
    job = Job(tmp_path, what, *options)
    ended, text = job.end()
    assert ended == code, text
    assert said in text
    attempts = {line.split()[1] for line in job.log.read_text().splitlines()}
    assert attempts == ({"0", "1"} if what == "recover" else {"0"})  # neither a refusal nor a stop is tried again


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_and_the_job_can_go_on_later(tmp_path: Path, number: signal.Signals) -> None:
    job = Job(tmp_path, "wait")
    job.workers()
    job.process.send_signal(number)
    job.process.send_signal(number)  # twice: the second one must not break the first
    code, said = job.end()
    assert code == 75, said
    assert f"{number.name} received" in said


def test_killed_entry_leaves_nobody_behind(tmp_path: Path) -> None:
    job = Job(tmp_path, "hang")
    workers = job.workers()
    job.process.kill()
    job.process.communicate(timeout=10)
    until = time.monotonic() + 5
    while (left := [pid for pid in workers if alive(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []


def test_a_second_ctrl_c_ends_a_job_that_does_not_listen(tmp_path: Path) -> None:
    job = Job(tmp_path, "hang")
    workers = job.workers()
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    job.process.send_signal(signal.SIGINT)
    code, said = job.end()
    assert code == 75
    assert "before the ranks could save" in said
    time.sleep(0.3)
    assert not any(alive(pid) for pid in workers)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# -- without starting anything ---------------------------------------------------------------------


def entry_says(*words: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from launch import entry; from shards.base.cli import run\n"
        "try: run(entry.main)\n"
        "finally: print('torch' in sys.modules)"
    )
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=20)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc-per-node=2", "--", "train.epochs=-1"], "train.epochs: input should be greater than 0"),
        (["train.epoch=3"], "Did you mean 'train.epochs'?"),
        (["--nproc-per-node=2", "train.epochs=3"], "Options of torchrun stand before a `--`"),
        (["--config", "nowhere.yaml"], "There is no config file nowhere.yaml"),
    ],
)
def test_wrong_settings_end_with_2_before_torch_is_imported(words: list[str], said: str) -> None:
    start = time.monotonic()
    answer = entry_says(*words)
    assert answer.returncode == 2
    assert said in answer.stderr
    assert answer.stdout == "False\n"
    assert time.monotonic() - start < 5  # about half a second on an idle machine


def test_help_tells_the_exit_codes() -> None:
    answer = entry_says("--help")
    assert answer.returncode == 0
    assert "75 stopped" in answer.stdout


def test_defaults_give_way_to_options_and_to_the_variables_a_cluster_sets() -> None:
    plain = entry.torchrun_options([], {})
    assert "--standalone" in plain
    assert any(word.startswith("--nproc-per-node=") for word in plain)
    assert f"--shutdown-timeout={entry.SHUTDOWN_SECONDS}" in plain
    given = ["--nnodes=2", "--nproc_per_node", "8", "--shutdown-timeout", "9"]
    assert entry.torchrun_options(given, {})[: len(given)] == given
    assert not any("standalone" in word or "=gpu" in word for word in entry.torchrun_options(given, {}))
    cluster = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}
    assert entry.torchrun_options([], cluster) == ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]


def test_without_the_entry_a_stop_is_told_by_the_exit_code_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(exit_status.FOLDER, raising=False)
    assert [exit_status.write_exit_status(kind) for kind in ("finished", "failed", "refused", "stopped")] == [
        0,
        1,
        2,
        75,
    ]
    monkeypatch.setenv(exit_status.FOLDER, str(tmp_path))
    assert [exit_status.write_exit_status(kind) for kind in ("finished", "failed", "refused", "stopped")] == [
        0,
        1,
        0,
        0,
    ]
    assert exit_status.read_exit_statuses(tmp_path)[0]["outcome"] == "stopped"
    monkeypatch.setenv(exit_status.FOLDER, str(tmp_path / "gone"))
    assert exit_status.write_exit_status("stopped") == 75


@pytest.mark.parametrize(
    ("end", "code"), [("return 75", 75), ("raise UserError('no')", 2), ("raise ValueError('x')", 1), ("exit(3)", 3)]
)
def test_a_rank_that_is_done_is_not_undone_by_the_end_of_its_interpreter(end: str, code: int) -> None:
    """Threads of other libraries may abort it there."""
    program = (
        "import atexit, os\nfrom pipeline.process.exit_status import run_rank\nfrom shards.base.errors import UserError\n"
        f"def main(argv):\n    atexit.register(os.abort)\n    print('told')\n    {end}\nrun_rank(main)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "told\n")
    assert "error: no\n" in done.stderr or "UserError" not in end
    assert "ValueError: x" in done.stderr or "ValueError" not in end
