"""Does fine-tuning from the head of `latent` classify better than the frozen model it starts from?

Both are trained as `--config photos` has it, on the same supermarket photographs with a long tail and wrong labels (those of
photos.py), at 128 pixels so that it can be done without a GPU: `latent` on features of the frozen backbone, then
`finetune model.start=RUN` of it. Tested on 661 other photographs with right labels after every epoch.

    python benchmarks/finetune.py                         goes on where it was stopped; rows are written as they finish
    python benchmarks/finetune.py draws=100 optim.lr=3e-4    other draws or settings are only printed
"""

from __future__ import annotations

import csv
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from photos import falsified, photographs
from record import keep

from pipeline.config import load
from pipeline.distributed.world import World
from pipeline.models.pretrained import with_weights_defaults
from pipeline.process.torch_settings import keep_freed_memory
from pipeline.training.build import build
from pipeline.training.trainer import Trainer
from shards.build import ensure
from shards.config import BuildConfig

RESULTS = Path(__file__).parent / "results" / "finetune.json"
DRAWS = (11, 12, 13)  # settings were chosen on draw 100
CELLS = ((10, "symmetric", 0.2), (10, "priors", 0.3))
SETTINGS = ("--config=photos", "data.size=128", "data.resize=146", "tracking.uri=", "tracking.system_metrics=false",
            "checkpoint.background=false", "data.threads=1")  # fmt: skip


def make_shards(draw: int, cell: tuple[int, str, float], folder: Path) -> tuple[str, np.ndarray]:
    """The shards of one draw, and the sizes of the classes."""
    pictures, label, test = photographs()
    index, given, size = falsified(np.zeros((int((~test).sum()), 1)), label, test, cell, draw)
    rows = [*zip(index, given, ["train"] * len(index)), *((i, label[i], "test") for i in np.flatnonzero(test))]
    with (folder / "list.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "given", "true", "split"])
        for number, kind, part in rows:
            (folder / f"{number:05d}.jpg").write_bytes(pictures[number])
            table.writerow([f"{number:05d}.jpg", f"{kind:02d}", f"{label[number]:02d}", part])
    source = BuildConfig(source="list", path=str(folder / "list.csv"), resize=160, output=str(folder / "shards"))
    return ensure(source, log=lambda text: None), size


def opened(shards: str, output: Path, seed: int, *words: str) -> Trainer:
    words = (*SETTINGS, f"shards.url={shards}", f"output={output}", f"seed={seed}", *words)
    return build(with_weights_defaults(load(list(words))), World())


def tested(trainer: Trainer, size: np.ndarray) -> dict[str, float]:
    """Accuracy, its mean over classes, and over the rarest third of them."""
    label, predicted = trainer.tests["test"].given, []
    trainer.method.eval()
    with torch.no_grad():
        for _, images in trainer.test_loaders["test"].survey():
            predicted.append(next(iter(trainer.method.scores(images).values())).argmax(1).numpy())
    right = np.concatenate(predicted) == label
    by_class = np.array([right[label == k].mean() for k in range(len(size))])
    rare = np.argsort(size, kind="stable")[: len(size) // 3]
    values = {"accuracy": right.mean(), "balanced": by_class.mean(), "rare": by_class[rare].mean()}
    return {name: round(100 * float(value), 2) for name, value in values.items()}


def frozen_run(draw: int, cell: tuple[int, str, float], folder: Path) -> tuple[Trainer, np.ndarray]:
    """`latent` in folder/frozen, and the sizes of the classes."""
    shards, size = make_shards(draw, cell, folder)
    trainer = opened(shards, folder / "frozen", draw, "method.name=latent")
    trainer.run()
    trainer.checkpoints.close()
    return trainer, size


def tuned_run(draw: int, folder: Path, words: list[str]) -> Trainer:
    own = ("method.name=finetune", f"model.start={folder / 'frozen'}", "checkpoint.every_epochs=0", *words)
    trainer = opened(str(folder / "shards"), folder / "tuned", draw, *own)
    for _ in trainer.steps():
        pass
    return trainer


def measured(draw: int, cell: tuple[int, str, float], words: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        frozen, size = frozen_run(draw, cell, Path(name))
        row = {"draw": draw, "cell": list(cell), "samples": len(frozen.train_split), "frozen": tested(frozen, size)}
        start = time.perf_counter()
        tuned = tuned_run(draw, Path(name), words)
        seconds, course = round(time.perf_counter() - start, 1), [epoch["test/top1"] for epoch in tuned.history]
        return row | {"finetune": tested(tuned, size), "course": course, "seconds": seconds}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of both, and how much better the second is: mean, deviation over draws and cells, worst."""
    out: dict[str, Any] = {"runs": len(rows)}
    for name in rows[0]["frozen"]:
        before, after = (np.array([row[arm][name] for row in rows]) for arm in ("frozen", "finetune"))
        gain = after - before
        values = {
            "frozen": before.mean(),
            "finetune": after.mean(),
            "gain": gain.mean(),
            "deviation": gain.std(),
            "worst": gain.min(),
        }
        out[name] = {key: round(float(value), 2) for key, value in values.items()}
    return out


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    logging.disable(logging.INFO)
    chosen = next((word for word in words if word.startswith("draws=")), "")
    others = [word for word in words if word != chosen]
    draws = tuple(int(number) for number in chosen.removeprefix("draws=").split(",")) if chosen else DRAWS
    judged = not words
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["rows"] if judged and RESULTS.is_file() else []
    done = {(row["draw"], *row["cell"]) for row in rows}
    for draw in draws:
        for cell in CELLS:
            if (draw, *cell) in done:
                continue
            rows.append(measured(draw, cell, others))
            print(rows[-1], flush=True)
            if judged:
                keep({"summary": summary(rows), "rows": rows}, "torch", "timm")
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
