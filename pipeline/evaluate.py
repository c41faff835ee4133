"""`python -m pipeline.evaluate RUN [shards=URL] [split=NAME] [out=DIR]`: the accuracy of a trained model on any shards.

Under torchrun all ranks share the work.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import Field

from pipeline.process.exit_status import run_rank
from shards.base import cli
from shards.base.errors import EXIT_USER_ERROR, UserError
from shards.base.files import output_folder
from shards.base.settings import Names, Settings

if TYPE_CHECKING:
    from pipeline.distributed.world import World
    from pipeline.evaluation.accuracy import Evaluation
    from pipeline.inference.open_run import OpenedRun
    from shards.reader import Split

T = TypeVar("T")


class EvaluateConfig(Settings):
    run: str = Field(description="output folder, checkpoint, MLflow run id or MLflow model")
    shards: str = Field("", description="folder or URL of shards; empty = those it was trained on")
    split: Names = Field([], description="splits, separated by commas; none = all but train")
    best: bool = Field(False, description="the best checkpoint instead of the newest")
    uri: str = Field("", description="MLflow tracking URI, for run ids and MLflow models")
    out: str = Field("", description="folder for evaluation.json and per-class tables; empty = print only")


COMMAND = cli.Command(
    "python -m pipeline.evaluate",
    "Evaluate a trained model on shards. For more than one rank: torchrun --nproc_per_node=8 -m pipeline.evaluate RUN",
    EvaluateConfig,
    words=("run",),
)


def evaluate_split(opened: OpenedRun, split: Split, world: World) -> Evaluation:
    """The model on one split, by true labels where they are known. Called by all ranks; an error of one rank is raised
    on all of them."""
    from pipeline.distributed.step_sync import StepSync
    from pipeline.evaluation.accuracy import evaluate

    model = opened.model
    loader = opened.loader(split, world)
    labels = split.true if (split.true >= 0).any() else split.given
    counts = model.clean_counts  # a class is many, medium or few by what the model was trained on
    errors: list[UserError] = []
    batches = _until_error(loader.survey(), errors)
    result = None
    try:
        result = evaluate(model.method, split.name, batches, labels, counts, world, StepSync(world), model.autocast)
    except StopIteration:  # no rank could read a picture
        errors = errors or [UserError(f"{split.url} has no picture in its split {split.name}.")]
    raise_everywhere(world, errors[0] if errors else None)
    assert result is not None
    if model.partial:
        result.metrics = {key: value for key, value in result.metrics.items() if key.count("/") == 1}
    return result


def _until_error(batches: Iterable[T], errors: list[UserError]) -> Iterator[T]:
    """The batches before an error. The rank goes on without pictures, so that the others do not wait for it."""
    try:
        yield from batches
    except UserError as error:
        errors.append(error)


class _OnAllRanks(UserError):
    """Raised on every rank."""


def raise_everywhere(world: World, error: UserError | None) -> None:
    """Called by all ranks: raises what any of them met, each sentence once, on every rank."""
    met: dict[str, list[int]] = {}
    for rank, sentence in enumerate(world.all_gather_object(str(error) if error else "")):
        if sentence:
            met.setdefault(sentence, []).append(rank)
    if met:
        lines = [
            sentence if len(ranks) == world.size else f"rank {', '.join(map(str, ranks))}: {sentence}"
            for sentence, ranks in met.items()
        ]
        raise _OnAllRanks("\n".join(lines))


def _open(config: EvaluateConfig, world: World) -> tuple[OpenedRun, dict[str, Split]]:
    """The model and the splits to evaluate it on."""
    from pipeline.inference.open_run import open_run, shards_url
    from shards.reader import read_manifest

    if config.out and world.is_main:
        output_folder(Path(config.out))
    opened = open_run(config.run, config.uri, config.best)
    url = shards_url(opened.name, config.shards, opened.shards)
    names = config.split or [name for name in read_manifest(url).splits if name != "train"]
    if not names:
        raise UserError(f"{url} has no split but train. Name it with split=train.")
    return opened, {name: opened.split(name, url) for name in names}


def _open_together(config: EvaluateConfig, world: World) -> tuple[OpenedRun, dict[str, Split]]:
    """`_open` on every rank; an error of one rank is raised on all of them."""
    errors: list[UserError] = []

    def attempt() -> tuple[OpenedRun, dict[str, Split]] | None:
        try:
            return _open(config, world)
        except UserError as error:
            errors.append(error)
            return None

    opened = world.each_rank(attempt)  # it may fetch a model and shards
    raise_everywhere(world, errors[0] if errors else None)
    assert opened is not None
    return opened


def main(argv: list[str]) -> int:
    config = COMMAND.load(argv)
    from pipeline.distributed import world as ranks

    world = ranks.init_distributed()
    try:
        opened, splits = _open_together(config, world)
        results = {name: evaluate_split(opened, split, world) for name, split in splits.items()}
    except _OnAllRanks as shared:
        if world.is_main:
            cli.print_error(shared)
        world.barrier()  # torchrun ends the other ranks when the first one exits: not before the error is printed
        return EXIT_USER_ERROR
    ranks.shutdown_distributed()  # not after an error: it would wait for operations that other ranks never join
    if world.is_main:
        for name, result in results.items():
            _print(name, opened, result)
        if config.out:
            _write(Path(config.out), opened, results)
    return 0


def _print(name: str, opened: OpenedRun, result: Evaluation) -> None:
    from rich.console import Console
    from rich.table import Table

    from shards.bias import class_groups
    from shards.names import few_in_words

    console = Console(width=None if Console().is_terminal else 100)
    known = {key.removeprefix(f"{name}/"): value for key, value in result.metrics.items()}
    shown = {key: value for key, value in known.items() if "top" in key or "/" not in key}
    few = class_groups(opened.model.clean_counts)["few"]
    sizes = {
        f"few_{name}_pictures": int(result.total[few].sum()),
        "few_training_samples": int(opened.model.clean_counts[few].sum()),
    }
    line = "  ".join(f"{k} {v:.2f}{few_in_words(sizes, name) if k == 'few' else ''}" for k, v in shown.items())
    console.print(f"{opened.name} on {name}: {line}")
    if len(opened.model.classes) > 20:
        return
    grid = Table()
    for column in ("class", "pictures", "correct", "accuracy"):
        grid.add_column(column, justify="left" if column == "class" else "right")
    for label, correct, total in zip(opened.model.classes, result.correct, result.total):
        grid.add_row(label, str(int(total)), str(int(correct)), f"{100 * correct / max(total, 1):.1f}")
    console.print(grid)


def _write(out: Path, opened: OpenedRun, results: dict[str, Evaluation]) -> None:
    record = {
        "run": opened.name,
        "run_id": opened.run_id,
        "metrics": {name: result.metrics for name, result in results.items()},
    }
    (out / "evaluation.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name, result in results.items():
        with (out / f"classes-{name}.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["class", "name", "pictures", "correct", "accuracy"])
            for k, label in enumerate(opened.model.classes):
                total, correct = int(result.total[k]), int(result.correct[k])
                table.writerow([k, label, total, correct, f"{correct / max(total, 1):.4f}"])
    print(f"wrote {out / 'evaluation.json'}")


def start() -> None:
    run_rank(main)


if __name__ == "__main__":
    start()
