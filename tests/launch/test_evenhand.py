"""`evenhand`: one name for all commands. It answers at once, and the shell completes what follows it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from launch.completion import candidates
from launch.evenhand import COMMANDS
from pipeline.audit import Action

ROOT = Path(__file__).parents[2]
HERE = os.environ | {"PYTHONPATH": str(ROOT)}


def evenhand(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "launch.evenhand", *words]
    return subprocess.run(line, capture_output=True, text=True, env=HERE, cwd=cwd)


def test_help_imports_next_to_nothing() -> None:
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "sys.argv = ['evenhand', '--help']\n"
        "from launch.evenhand import main\n"
        "main()\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "assert not new & {'torch', 'mlflow', 'numpy', 'pydantic', 'yaml', 'pipeline', 'shards'}, new\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=HERE)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^  ([\w-]+) ", done.stdout, re.M) == [*COMMANDS, "completion"]
    assert "torchrun --nproc_per_node=8" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_the_name_it_was_called_by(name: str) -> None:
    done = evenhand(name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: evenhand {name} ")
    assert ("torchrun --nproc_per_node=8" in done.stdout) == (name in ("train", "embed", "evaluate"))
    module = COMMANDS[name].prog.removeprefix("python -m ").split()
    same = subprocess.run([sys.executable, "-m", *module, "--help"], capture_output=True, text=True, env=HERE, cwd=ROOT)
    assert same.stdout == done.stdout.replace(f"usage: evenhand {name} ", f"usage: {COMMANDS[name].prog} ")


def test_a_mistake_is_answered_with_the_nearest_command() -> None:
    done = evenhand("audt", "runs/x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: There is no command audt. Did you mean audit? evenhand --help lists them.\n"
    done = evenhand("train", "train.epoch=3")
    assert done.returncode == 2
    assert "Did you mean 'train.epochs'?\nevenhand train --help lists every setting." in done.stderr
    assert "evenhand train --help lists every setting." in evenhand("sweep", "out=x", "--", "train.epoch=3").stderr
    assert "Write: evenhand audit RUN [key=value ...]" in evenhand("audit").stderr
    assert "Write: evenhand replay FOLDER [key=value ...]" in evenhand("replay").stderr


def test_a_command_does_its_work_and_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    done = evenhand("build", "output=shards", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Look at them with: evenhand inspect " in done.stdout
    assert evenhand("verify", "shards", cwd=tmp_path).returncode == 0
    shard = min((tmp_path / "shards").glob("*.tar"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert evenhand("verify", "shards", cwd=tmp_path).returncode == 1


# -- completion ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("evenhand tr", ["train"]),
        ("evenhand re", ["report", "replay"]),
        ("evenhand completion z", ["zsh"]),
        ("evenhand train train.ep", ["train.epochs="]),
        ("evenhand train tra", ["tracking.", "train."]),
        ("evenhand train engine=", ["engine=ddp", "engine=deepspeed"]),
        ("evenhand train engine=de", ["engine=deepspeed"]),
        ("evenhand train data.flip=t", ["data.flip=true"]),
        ("evenhand train method.name=el", ["method.name=elr", "method.name=elr_plus"]),
        ("evenhand train --config cifar10_", ["cifar10_features", "cifar10_lt", "cifar10_lt_small"]),
        ("evenhand train --config=dig", ["--config=digits"]),
        ("evenhand train --config configs/d", ["configs/digits.yaml"]),
        ("evenhand train --config con", ["configs/"]),
        ("evenhand train --pr", ["--print-config"]),
        ("evenhand train --e", ["--estimate"]),
        ("evenhand audit runs/x apply=", [f"apply={action}" for action in get_args(Action)]),
        ("evenhand audit runs/x th", ["threshold="]),
        ("evenhand audit runs/", []),  # the shell offers files
        ("evenhand audit runs/x out=ru", []),
        ("evenhand sweep vary.method.na", ["vary.method.name="]),
        ("evenhand sweep vary.train.ep", ["vary.train.epochs="]),
        ("evenhand sweep job", ["jobs="]),
        ("evenhand sweep out=x -- reci", ["recipe="]),
        ("evenhand kubernetes task=build -- rh", ["rho="]),
        ("evenhand kubernetes ki", ["kind="]),
        ("evenhand kubernetes nodes_w", ["nodes_with."]),
        ("evenhand nonsense a", []),
    ],
)
def test_candidates(line: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert candidates(line) == expected


def test_options_of_the_chosen_method_are_offered() -> None:
    every = candidates("evenhand train method.")
    chosen = candidates("evenhand train method.name=elr method.")
    assert {"method.name=", "method.temperature="} <= set(every)
    assert "method.name=" in chosen
    assert "method.temperature=" not in chosen
    assert set(chosen) < set(every)


@pytest.fixture(scope="module")
def shell_path(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with `evenhand` of this source tree on its PATH."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "evenhand"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m launch.evenhand "$@"\n')
    script.chmod(0o755)
    return HERE | {"PATH": f"{folder}:{os.environ['PATH']}"}


def complete_in_bash(line: str, env: dict[str, str], cwd: Path) -> list[str]:
    """COMPREPLY of real bash, which cuts a line into words at COMP_WORDBREAKS."""
    words = [word for word in re.split(r"\s+|([=:])", line) if word]
    if line[-1] in " =:":
        words.append("")
    quoted = " ".join(f"'{word}'" for word in words)
    code = f"""
source <(evenhand completion bash)
COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=({quoted}) COMP_CWORD={len(words) - 1}
complete -p evenhand >&2
_evenhand evenhand "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, env=env, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "complete -o default -F _evenhand evenhand" in done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("evenhand ", [*COMMANDS, "completion", "--help", "--version"]),
        ("evenhand au", ["audit"]),
        ("evenhand train train.ep", ["train.epochs="]),
        ("evenhand train engine=", ["ddp", "deepspeed"]),
        ("evenhand train engine=dd", ["ddp"]),
        ("evenhand train --config dig", ["digits"]),
        ("evenhand audit runs/x apply=re", ["relabel"]),
        ("evenhand audit s3://bucket/r", []),
    ],
)
def test_bash_completes(line: str, expected: list[str], shell_path: dict[str, str], tmp_path: Path) -> None:
    assert complete_in_bash(line, shell_path, tmp_path) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script_that_asks_for_candidates(shell: str) -> None:
    done = evenhand("completion", shell)
    assert done.returncode == 0
    assert "evenhand complete " in done.stdout
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n", "/dev/stdin"], input=done.stdout, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
    wrong = evenhand("completion", "csh")
    assert (wrong.returncode, wrong.stderr) == (2, "error: Write: evenhand completion bash|zsh|fish\n")
