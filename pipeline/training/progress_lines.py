"""What a run tells while it trains: bars on a terminal, lines in the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta

from torch import Tensor

from pipeline.config import Config
from pipeline.distributed.world import World
from pipeline.process.log import log
from shards.base.progress import Progress, waiting
from shards.reader import Split

STEPS = "steps"  # among the summed losses: how many steps were summed


def start_line(config: Config, world: World, train: Split, tests: dict[str, Split]) -> str:
    """What is trained, on what, where."""
    held_out = ", ".join(f"{len(split)} {name}" for name, split in tests.items())
    bias = train.manifest.bias
    asked = f", rho={bias.rho:g}, noise={bias.noise:g}" if bias.rho != 1 or bias.noise else ""
    return (
        f"{config.method.name} with {config.model.backbone}: {len(train)} training samples, {held_out}, "
        f"{len(train.classes)} classes{asked}; {world.about}; output {config.output}"
    )


def step_bar(steps: int, done: int, title: str, world: World) -> Progress:
    return Progress(steps, "steps", log.info if world.is_main else None, world.is_main, title, done)


def show_loss(bar: Progress, loss_sums: dict[str, Tensor]) -> None:
    """A line with the mean loss of the epoch so far on this rank, when this step is counted. The host waits for the device here."""
    loss, steps = loss_sums["loss"].item(), loss_sums[STEPS].item()
    bar.note, bar.line_due = f"loss {loss / steps:.3f}", True


def counted(batches: Iterable[tuple[Tensor, Tensor]], total: int, title: str, world: World) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """(index, images) of a rank's part of `total` pictures, counted."""
    own = world.rank_slice_sizes(total)[world.rank]
    bar = Progress(own, "pictures", log.info if world.is_main else None, world.is_main, title)
    return bar.over(batches, lambda batch: len(batch[0]))


def fitting(method: str, world: World) -> AbstractContextManager[None]:
    """While a method updates its beliefs, which some do for long."""
    return waiting(f"{method}: fitting to the survey", log.info if world.is_main else None)


def bad_gradient(steps: int, where: str, samples: list[int], newest: str | None) -> str:
    """The sentence of a run that stops because of its gradients."""
    return (
        f"The gradient was not finite for {steps} steps in a row, up to {where}. Its samples: "
        f"{', '.join(map(str, samples[:16]))}{', ...' if len(samples) > 16 else ''}. Lower optim.lr, set optim.clip, or "
        f"use train.precision=fp32. The last good checkpoint is {newest or 'none yet'}."
    )


def epoch_line(metrics: dict[str, float], done: int, epochs: int) -> str:
    """`epochs`: of the whole training; the time left is that of epochs as long as those before."""
    names = {
        "test/top1": "top1 %.2f",
        "validation/top1": "validation %.2f",
        "clean/f1": "clean-F1 %.3f",
        "clean/threshold": "threshold %.3f",
        "loss/total": "loss %.3f",
    }
    shown = [text % metrics[key] for key, text in names.items() if key in metrics]
    if speed := metrics.get("time/images_per_second", 0):  # a method without steps has none
        shown.append(f"{speed:.0f} img/s")
    if done < epochs:
        shown.append(f"{timedelta(seconds=round(metrics['time/seconds'] / done * (epochs - done)))} left")
    return "  ".join([f"epoch {done} of {epochs}", *shown])
