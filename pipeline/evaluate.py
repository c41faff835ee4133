"""`python -m pipeline.evaluate RUN [--shards URL] [--split NAME] [--out DIR]`: a trained model on any shards.

Under torchrun all ranks do it together.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.process.exit_status import run_rank
from shards.base.errors import EXIT_USER_ERROR, UserError
from shards.base.files import output_folder

if TYPE_CHECKING:
    from pipeline.distributed.world import World
    from pipeline.evaluation.accuracy import Evaluation
    from pipeline.inference.open_run import OpenedRun


def judge(opened: OpenedRun, shards: str, name: str, world: World) -> Evaluation:
    """The model on one split; true labels where they are known. Called by all ranks."""
    from pipeline.data.loader import open_loader
    from pipeline.distributed.step_sync import StepSync
    from pipeline.evaluation.accuracy import evaluate

    split = opened.split(name, shards)
    model = opened.model
    loader = open_loader(split, model.config.data, model.config.seed, world)
    labels = split.true if (split.true >= 0).any() else split.given
    counts = model.clean_counts  # a class is many, medium or few by what the model was trained on
    found = evaluate(model.method, name, loader.survey(), labels, counts, world, StepSync(world), model.autocast)
    if model.partial:
        found.metrics = {key: value for key, value in found.metrics.items() if key.count("/") == 1}
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline.evaluate", description="Judge a trained model on shards.")
    parser.add_argument("run", metavar="RUN", help="output folder, checkpoint, MLflow run id or MLflow model")
    parser.add_argument("--shards", default="", help="folder or URL of shards; default: those it was trained on")
    parser.add_argument(
        "--split",
        action="append",
        default=[],
        help="split; may be given several times; default: all but train",
    )
    parser.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
    parser.add_argument("--uri", default="", help="MLflow tracking URI, for run ids and MLflow models")
    parser.add_argument("--out", type=Path, help="folder for evaluation.json and per-class tables")
    options = parser.parse_args(argv)
    from pipeline.distributed import world as ranks
    from pipeline.inference.open_run import open_run, where
    from shards.reader import read_manifest

    world = ranks.init_distributed()
    try:
        if options.out and world.is_main:
            output_folder(options.out)
        opened = open_run(options.run, options.uri, options.best)
        place = where(opened.name, options.shards, opened.shards)
        names = options.split or [name for name in read_manifest(place).splits if name != "train"]
        if not names:
            raise UserError(f"{place} has no split but train. Name it with --split train.")
        results = {name: judge(opened, place, name, world) for name in names}
    except UserError:
        if world.is_main:
            raise
        return EXIT_USER_ERROR  # told once, by the lead
    finally:
        ranks.shutdown_distributed()
    if world.is_main:
        for name, result in results.items():
            _print(name, opened, result)
        if options.out:
            _write(options.out, opened, results)
    return 0


def _print(name: str, opened: OpenedRun, result: Evaluation) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 100)
    known = {key.removeprefix(f"{name}/"): value for key, value in result.metrics.items()}
    shown = {key: value for key, value in known.items() if "top" in key or "/" not in key}
    console.print(f"{opened.name} on {name}: " + "  ".join(f"{key} {value:.2f}" for key, value in shown.items()))
    if len(opened.model.classes) > 20:
        return
    grid = Table()
    for column in ("class", "pictures", "correct", "accuracy"):
        grid.add_column(column, justify="left" if column == "class" else "right")
    for label, correct, total in zip(opened.model.classes, result.correct, result.total):
        grid.add_row(label, str(int(total)), str(int(correct)), f"{100 * correct / max(total, 1):.1f}")
    console.print(grid)


def _write(out: Path, opened: OpenedRun, results: dict[str, Evaluation]) -> None:
    facts = {
        "run": opened.name,
        "run_id": opened.run_id,
        "metrics": {name: result.metrics for name, result in results.items()},
    }
    (out / "evaluation.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    for name, result in results.items():
        with (out / f"classes-{name}.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["class", "name", "pictures", "correct", "accuracy"])
            for k, label in enumerate(opened.model.classes):
                total, correct = int(result.total[k]), int(result.correct[k])
                table.writerow([k, label, total, correct, f"{correct / max(total, 1):.4f}"])
    print(f"wrote {out / 'evaluation.json'}")


if __name__ == "__main__":
    run_rank(main)
