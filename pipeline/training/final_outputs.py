"""What a finished run writes to its folder and to MLflow: summary, figures, tables, the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.config import Config
from pipeline.evaluation.accuracy import Evaluation, evaluate
from pipeline.features.encoder import stored_encoder
from pipeline.process.log import log
from pipeline.tracking.final_metrics import best_and_last, best_epoch, chosen_on, mean_of_last
from pipeline.training.progress_lines import counted
from pipeline.training.trainer import Trainer
from shards.base.files import atomic_write
from shards.base.progress import waiting
from shards.config import VALIDATION
from shards.names import known_bias, name_of_shards, size_of_few

PER_CLASS = "per_class.json"
EMBEDDED = 1000  # test pictures on the embedding map


def summarise(config: Config, trainer: Trainer) -> dict[str, Any]:
    """The numbers that scripts and people read first."""
    history, manifest = trainer.history, trainer.train_split.manifest
    known = known_bias(manifest)
    last = history[-1]
    best = best_epoch(history)
    return {
        "method": config.method.name,
        "seed": config.seed,
        "dataset": name_of_shards(trainer.train_split.url, manifest),
        "rho": known.get("rho"),  # None: nothing was injected, and nobody knows
        "noise": known.get("noise"),
        "epochs": len(history),
        "ranks": trainer.world.size,
        "best": history[best]["test/top1"],
        "best_epoch": best,
        "best_chosen_on": chosen_on(last),
        "last": last["test/top1"],
        "mean_last10": mean_of_last(history),
        "many": last.get("test/many"),
        "medium": last.get("test/medium"),
        "few": last.get("test/few"),
        **of_validation(history),
        **size_of_few(manifest),
        "clean_f1": _last_of(history, "clean/f1"),
        "clean_auc": _last_of(history, "clean/auc"),
        "seconds": trainer.clock.seconds,
        "images_per_second": last.get("time/images_per_second"),  # None: nothing was trained
        "recipe": config.recipe,
        "manifest": manifest.hash,
        "run_id": trainer.tracker.run_id,
    }


def _last_of(history: list[dict[str, float]], key: str) -> float | None:
    return next((past[key] for past in reversed(history) if key in past), None)


def of_validation(history: list[dict[str, float]]) -> dict[str, float | None]:
    """The same numbers on the validation split, if there is one."""
    last = history[-1]
    if chosen_on(last) != VALIDATION:
        return {}
    key = f"{VALIDATION}/top1"
    means = {"best": history[best_epoch(history)][key], "last": last[key], "mean_last10": mean_of_last(history, key)}
    groups = {group: last.get(f"{VALIDATION}/{group}") for group in ("many", "medium", "few")}
    return {f"{VALIDATION}_{name}": value for name, value in {**means, **groups}.items()}


def write_final_outputs(trainer: Trainer, folder: Path) -> dict[str, Any] | None:
    """Write everything; returns the summary on rank 0. Called by all ranks: all compute the confidence on the training set."""
    split = trainer.train_split
    confidence = evaluate(
        trainer.method,
        "train",
        counted(trainer.loader.survey(), len(split), "confidence in the training labels", trainer.world),
        split.given,
        split.clean_counts,
        trainer.world,
        trainer.step_sync,
        trainer.autocast,
    ).confidence
    if not trainer.last_evaluation:  # resumed after the last epoch
        trainer.evaluate_all()
    with waiting("writing figures and the model", log.info if trainer.world.is_main else None):
        summary = trainer.world.on_main(lambda: _write(trainer, folder, confidence))
    return summary if trainer.world.is_main else None


def _write(trainer: Trainer, folder: Path, confidence: dict[str, np.ndarray]) -> dict[str, Any]:
    config, split, test = trainer.config, trainer.train_split, trainer.last_evaluation["test"]
    _write_classes(folder, split.classes, split.clean_counts, test)
    from pipeline.reports.figures import write_figures

    write_figures(folder, _figure_data(trainer, test, confidence))
    (folder / "manifest.json").write_bytes(split.manifest.to_bytes())
    summary, tracker = summarise(config, trainer), trainer.tracker
    tracker.log(0, best_and_last(trainer.history))  # MLflow draws bars of what has no step but 0
    for name in ("config.yaml", "manifest.json", "classes.csv", "confusion.csv", "figures"):
        tracker.artifact(folder / name)
    tracker.artifact(folder / PER_CLASS, table=True)
    if config.tracking.log_model:
        from pipeline.inference.model import export_model

        encoder = stored_encoder(config, trainer.features["url"], torch.device("cpu")) if trainer.features else None
        counts = split.clean_counts.tolist()
        exported = export_model(trainer.method, config, split.classes, counts, folder / "model", encoder)
        tracker.model(exported, config.tracking.register_as)
    _write_json(folder / "summary.json", summary)  # last: a run with a summary is finished
    tracker.artifact(folder / "summary.json")
    return summary


def record_mlflow_run(folder: Path, summary: dict[str, Any], run_id: str | None) -> None:
    """Write the run id if MLflow answered after the summary was made."""
    if run_id and summary["run_id"] != run_id:
        summary["run_id"] = run_id
        _write_json(folder / "summary.json", summary)


def _figure_data(trainer: Trainer, test: Evaluation, confidence: dict[str, np.ndarray]) -> dict[str, Any]:
    split = trainer.train_split
    last = trainer.history[-1]
    vectors, labels = _embedded(trainer)
    return {
        "method": trainer.config.method.name,
        "history": [{"epoch": epoch, "metrics": metrics} for epoch, metrics in enumerate(trainer.history, 1)],
        "class_names": list(split.classes),
        "class_counts": split.clean_counts,
        "per_class_accuracy": test.correct / np.maximum(test.total, 1),
        "confusion": test.confusion,
        "marginal": test.marginal,
        "confidence": confidence,
        "group_f1": {
            group: last[f"clean/f1_{group}"] for group in ("many", "medium", "few") if f"clean/f1_{group}" in last
        },
        "embedding": vectors,
        "embedding_labels": labels,
    }


@torch.no_grad()
def _embedded(trainer: Trainer) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of EMBEDDED test pictures of rank 0."""
    split = trainer.tests["test"]
    vectors: list[np.ndarray] = []
    indices: list[np.ndarray] = []
    trainer.method.eval()
    for index, images in trainer.test_loaders["test"].survey():
        vectors.append(trainer.method.embeddings(images).float().cpu().numpy())
        indices.append(index.cpu().numpy())
        if sum(len(i) for i in indices) >= EMBEDDED:
            break
    rows = np.concatenate(indices)[:EMBEDDED]
    return np.concatenate(vectors)[:EMBEDDED], split.given[rows]


def _write_classes(folder: Path, names: list[str], counts: np.ndarray, test: Evaluation) -> None:
    import csv

    columns = ["class", "name", "training_samples", "test_samples", "correct", "accuracy"]
    rows = [
        [
            k,
            name,
            int(counts[k]),
            int(test.total[k]),
            int(test.correct[k]),
            round(test.correct[k] / max(test.total[k], 1), 4),
        ]
        for k, name in enumerate(names)
    ]
    with open(folder / "classes.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows([*row[:-1], f"{row[-1]:.4f}"] for row in rows)
    shown = {"columns": columns, "data": rows}  # the layout of mlflow.log_table
    (folder / PER_CLASS).write_text(json.dumps(shown), encoding="utf-8")
    with open(folder / "confusion.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["true \\ predicted", *names])
        table.writerows([name, *map(int, row)] for name, row in zip(names, test.confusion))


def _write_json(path: Path, value: Any) -> None:
    atomic_write(path, json.dumps(value, indent=1) + "\n")
    log.info("wrote %s", path)
