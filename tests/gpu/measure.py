"""Trains every method on the fake CUDA device and counts what a step, a survey batch and an evaluation batch cost there.

    python tests/gpu/measure.py                 measure, and say what differs from budgets.json
    python tests/gpu/measure.py --write         measure, and write budgets.json anew

Further words are names of methods; without them it measures all. The training is the real one: `build`'s method, the
loader, the engine, the trainer, with the method's recipe from configs/ on a tiny network.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from fake_cuda import CUDA, Counts, FakeCuda, fake_ranks  # noqa: E402
from rivals import SIZE, MemorySplit, Pictures  # noqa: E402
from torch import Tensor  # noqa: E402

from pipeline import config as settings  # noqa: E402
from pipeline.checkpoints.checkpointer import Checkpointer  # noqa: E402
from pipeline.config import Config  # noqa: E402
from pipeline.data.batch import Batch, Pass  # noqa: E402
from pipeline.data.loader import Loader  # noqa: E402
from pipeline.distributed.world import World  # noqa: E402
from pipeline.engines import make_engine  # noqa: E402
from pipeline.methods.options import MethodOptions  # noqa: E402
from pipeline.models import backbones  # noqa: E402
from pipeline.models.preact_resnet import PreActResNet18  # noqa: E402
from pipeline.process.amx import avoid_broken_amx  # noqa: E402
from pipeline.tracking.tracker import NullTracker  # noqa: E402
from pipeline.training.build import _build_method  # noqa: E402
from pipeline.training.trainer import Trainer, TrainingData  # noqa: E402

BUDGETS = Path(__file__).parent / "budgets.json"
METHODS = tuple(options.model_fields["name"].default for options in get_args(get_args(MethodOptions)[0]))
CLASSES = 3


@dataclass(frozen=True)
class FakeWorld(World):
    """One rank among others that do not exist. It counts as the main one: nobody would send what that one computes."""

    device: torch.device = CUDA

    @property
    def is_main(self) -> bool:
        return True

    def broadcast_object(self, value: Any) -> Any:
        return value

    def on_main(self, work: Callable[[], Any]) -> Any:
        return work()

    def each_rank(self, work: Callable[[], Any]) -> Any:
        return work()


# One rank as on one GPU, in half precision; then one of many, in full precision and with averaged weights.
SETUPS: dict[str, tuple[FakeWorld, int, list[str]]] = {
    "one rank, bf16": (
        FakeWorld(),
        64,
        ["data.batch=16", "data.eval_batch=16", "train.precision=bf16", "model.channels_last=true"],
    ),
    "rank 3 of 8, fp32": (
        FakeWorld(3, 8),
        128,
        ["data.batch=32", "data.eval_batch=4", "data.augmix=none", "model.ema=0.9"],
    ),
}
# What decides the length of a pass in the recipes, made small. Three epochs where the last third has a rule of its own.
TINY: dict[str, list[str]] = {
    **{name: ["train.epochs=3"] for name in ("ldam_drw", "mentornet", "har")},
    "prototypical": ["method.warmup_steps=3"],
    "rrl": ["method.warmup_steps=3", "method.neighbours=5"],
    "mopro": ["method.queue=64"],
    "ssr": ["method.neighbours=5"],
    "aum": ["method.percentile=0"],  # leaves few samples out
    **{name: ["method.warmup_batch=1", "method.threshold=0.2"] for name in ("dividemix", "sfa", "dasc")},
    "rolt": ["method.warmup_batch=1", "method.threshold=0.2", "train.epochs=3"],
}


def tiny_config(method: str, *words: str) -> Config:
    """The method's own recipe for CIFAR-10-LT, on 8x8 pictures."""
    return settings.load(
        [
            "--config", str(ROOT / "configs/cifar10_lt.yaml"), f"method.name={method}", "train.epochs=2", f"data.size={SIZE}",
            "data.padding=1", "data.mix_group=4", "data.threads=1", "model.width=4", "model.embedding=6", "optim.clip=5",
            "train.log_every=1000", "checkpoint.background=false", "tracking.system_metrics=false",
            *TINY.get(method, []), *words,
        ]
    )  # fmt: skip


def stage_names(method: str) -> list[str]:
    split: Any = MemorySplit(Pictures(CLASSES, CLASSES), CLASSES)
    return [stage.name for stage in _build_method(tiny_config(method, "data.batch=16"), split, World()).stages()]


class Shallow(PreActResNet18):
    """The stem and one block: what a method adds should show beside what its network costs."""

    def __init__(self, width: int, norm: str) -> None:
        super().__init__(width, norm)
        self.stages, self.features = self.stages[0][:1], width  # type: ignore[index]


class MarkedLoader(Loader):
    """Tells the device where a batch begins. A window holds the work on a batch and the loading of the next."""

    kind = "survey"
    place = ""  # stage and epoch

    def batches(self, pass_: Pass, order_key: int, first_step: int = 0) -> Iterator[Batch]:
        for batch in super().batches(pass_, order_key, first_step):
            self._mark(f"step in {self.place}")
            yield batch
        self._mark("")

    def survey(self, first_row: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for item in super().survey(first_row):
            self._mark(f"{self.kind} batch in {self.place}")
            yield item
        self._mark("")

    def _mark(self, name: str) -> None:
        if FakeCuda.now is not None:
            FakeCuda.now.mark(name)


def trainer_of(config: Config, world: World, samples: int) -> Trainer:
    """A trainer in memory whose windows are named by stage and epoch. Everything but the files is the real thing."""
    split: Any = MemorySplit(Pictures(samples, CLASSES), CLASSES)
    with mock.patch.object(backbones, "PreActResNet18", Shallow):
        method = _build_method(config, split, world)
    test: Any = MemorySplit(Pictures(samples * 3 // 4, CLASSES), CLASSES)
    loaders = [MarkedLoader(part, config.data, config.seed, world) for part in (split, test)]
    loaders[1].kind = "evaluation"
    data = TrainingData(split, {"test": test}, loaders[0], {"test": loaders[1]})
    checkpoints = Checkpointer(f"memory://{uuid.uuid4().hex}", 2, world, background=False)
    trainer = Trainer(config, world, method, make_engine(config, method, world), data, checkpoints, NullTracker())
    names, set_epoch = [stage.name for stage in method.stages()], method.set_epoch

    def named(stage: int, epoch: int) -> None:
        for loader in loaders:
            loader.place = f"{names[stage]}, epoch {epoch + 1}"
        set_epoch(stage, epoch)

    method.set_epoch = named  # type: ignore[method-assign]
    return trainer


def windows_of(method: str, setup: str) -> list[Counts]:
    """A whole training: every stage, epoch, survey, evaluation, checkpoint; then embeddings, as the audit needs them."""
    world, samples, words = SETUPS[setup]
    if method == "elr_plus":  # averages its weights itself
        words = [word for word in words if not word.startswith("model.ema")]
    config = tiny_config(method, *words)
    with FakeCuda() as device, fake_ranks(world.rank, world.size) if world.size > 1 else nullcontext():
        _train(config, world, samples)
    return device.windows


def _train(config: Config, world: World, samples: int) -> None:
    trainer = trainer_of(config, world, samples)
    trainer.run()
    trainer.method.eval()
    with torch.no_grad():
        for _, images in Loader.survey(trainer.loader):
            assert trainer.method.embeddings(images).device.type == "cuda"


Row = dict[str, Any]


def budget(windows: list[Counts]) -> dict[str, Row]:
    """By kind of batch: the largest counts of its steady windows, which are neither the first nor the last of their loop."""
    out: dict[str, Row] = {}
    for before, window, after in zip(windows, windows[1:], windows[2:]):
        if not before.name == window.name == after.name or not window.name:
            continue
        row = out.setdefault(window.name, {"operators": 0, "collectives": 0, "host_collectives": 0, "syncs": {}})
        for key in ("operators", "collectives", "host_collectives"):
            row[key] = max(row[key], getattr(window, key))
        for place, count in sorted(window.syncs.items()):
            row["syncs"][place] = max(row["syncs"].get(place, 0), count)
    return _joined(out)


def _joined(rows: dict[str, Row]) -> dict[str, Row]:
    """Neighbouring epochs of a stage that cost the same become one row."""
    runs: list[tuple[str, str, str, Row]] = []  # kind, first and last epoch, counts
    for name, row in sorted(rows.items()):
        kind, _, epoch = name.partition(", epoch ")
        if runs and runs[-1][0] == kind and runs[-1][3] == row:
            runs[-1] = (kind, runs[-1][1], epoch, row)
        else:
            runs.append((kind, epoch, epoch, row))
    return {f"{kind}, epoch {first}" + (f" to {last}" if last != first else ""): row for kind, first, last, row in runs}


def measure(methods: tuple[str, ...], setups: tuple[str, ...]) -> dict[str, Any]:
    """method -> setup -> budget, or {"error": ...}."""
    out: dict[str, Any] = {}
    for method in methods:
        for setup in setups:
            try:
                found: Any = budget(windows_of(method, setup))
            except Exception:
                found = {"error": traceback.format_exc()}
            out.setdefault(method, {})[setup] = found
    return out


def differences(method: str, expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """One line per row that is not as in the table."""
    lines: list[str] = []
    for setup in sorted({*expected, *found}):
        old, new = expected.get(setup, {}), found.get(setup, {})
        if "error" in new:
            lines.append(f"{method}, {setup}: {new['error']}")
            continue
        for batch in sorted({*old, *new}):
            if old.get(batch) != new.get(batch):
                lines.append(f"{method}, {setup}, {batch}:\n    was {old.get(batch)}\n    is  {new.get(batch)}")
    return lines


def as_table(found: dict[str, Any]) -> str:
    """JSON with one row per line."""
    methods = []
    for method, setups in sorted(found.items()):
        parts = []
        for setup, rows in sorted(setups.items()):
            lines = ",\n".join(f"   {json.dumps(batch)}: {json.dumps(row)}" for batch, row in sorted(rows.items()))
            parts.append(f"  {json.dumps(setup)}: {{\n{lines}\n  }}")
        methods.append(f" {json.dumps(method)}: {{\n" + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(methods) + "\n}\n"


def main() -> int:
    avoid_broken_amx()  # the fake device computes on the CPU, in half precision too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=METHODS, metavar="method")
    parser.add_argument("--write", action="store_true")
    words = parser.parse_args()
    logging.disable(logging.WARNING)
    found = measure(tuple(words.methods), tuple(SETUPS))
    table = json.loads(BUDGETS.read_text()) if BUDGETS.exists() else {}
    lines = [line for method in found for line in differences(method, table.get(method, {}), found[method])]
    print("\n".join(lines) or "as in budgets.json")
    if words.write and not any("error" in part for setups in found.values() for part in setups.values()):
        BUDGETS.write_text(as_table({name: rows for name, rows in (table | found).items() if name in METHODS}))
        return 0
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
