"""`evenhand COMMAND ...`: every command of this project under one name.

Only the standard library is imported before the command is known, so that `evenhand --help` answers at once.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NamedTuple


class Entry(NamedTuple):
    prog: str  # the same command without this one
    about: str

    @property
    def module(self) -> str:
        name = self.prog.split()[2]
        return "pipeline.tracking.__main__" if name == "pipeline.tracking" else name


COMMANDS = {
    "quick": Entry("python -m launch.quick", "pictures in, a model, wrong labels and a report out; start here"),
    "build": Entry("python -m shards.build", "turn pictures into shards"),
    "inspect": Entry("python -m shards.inspect", "show what is in shards"),
    "verify": Entry("python -m shards.verify", "check shards against their manifest"),
    "train": Entry("python -m pipeline.train", "train on one rank; for more: torchrun -m pipeline.train"),
    "embed": Entry("python -m pipeline.embed", "store the features of a frozen backbone; training does it by itself"),
    "sweep": Entry("python -m launch.sweep", "many trainings that differ in named settings, and one table"),
    "audit": Entry("python -m pipeline.audit", "list the labels that are probably wrong"),
    "evaluate": Entry("python -m pipeline.evaluate", "the accuracy of a trained model on any shards"),
    "predict": Entry("python -m pipeline.predict", "classify picture files"),
    "report": Entry("python -m pipeline.report", "compare the runs in MLflow"),
    "kubernetes": Entry("python -m launch.kubernetes", "print the manifests of a batch job"),
    "gpu-check": Entry(
        "python -m launch.gpu_check", "check the GPUs of this machine: results, memory, images per second"
    ),
    "replay": Entry("python -m pipeline.tracking replay", "send a journal to MLflow that a dead job left"),
}
SHELLS = ("bash", "zsh", "fish")


def help_text() -> str:
    lines = [f"  {name:<12}{entry.about}" for name, entry in COMMANDS.items()]
    return "\n".join(
        [
            "usage: evenhand COMMAND [--help] [key=value ...]",
            "",
            "Train image classifiers on data that is long-tailed and mislabelled.",
            "",
            *lines,
            f"  {'completion':<12}print the completion script of a shell: {', '.join(SHELLS)}",
            "",
            "evenhand COMMAND --help lists the settings of a command. The same commands start as python -m MODULE;",
            "torchrun needs that: torchrun --nproc_per_node=8 --standalone -m pipeline.train --config digits",
            "",
        ]
    )


def main() -> None:
    """The console script."""
    name, rest = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("--help", [])
    if name in ("-h", "--help", "help"):
        print(help_text(), end="")
    elif name == "--version":
        from importlib.metadata import version

        print(version("evenhand"))
    elif name == "completion":
        _print_completion(rest)
    elif name == "complete":  # called by the completion scripts
        from launch.completion import candidates

        print("".join(f"{word}\n" for word in candidates(rest[0] if rest else "")), end="")
    elif name in COMMANDS:
        _start(name, rest)
    else:
        _refuse(f"There is no command {name}.{_nearest(name)} evenhand --help lists them.")


def _start(name: str, rest: list[str]) -> None:
    from shards.base.interrupt import ends_at_once

    with ends_at_once():
        from shards.base.cli import use_names

        module = import_module(COMMANDS[name].module)
    use_names({entry.prog: f"evenhand {key}" for key, entry in COMMANDS.items()})
    sys.argv = [f"evenhand {name}", *rest]
    module.start()


def _print_completion(rest: list[str]) -> None:
    if len(rest) != 1 or rest[0] not in SHELLS:
        _refuse(f"Write: evenhand completion {'|'.join(SHELLS)}")
    from launch.completion import SCRIPTS

    print(SCRIPTS[rest[0]], end="")


def _nearest(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, [*COMMANDS, "completion"], 1, 0.5)
    return f" Did you mean {near[0]}?" if near else ""


def _refuse(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
