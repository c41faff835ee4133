"""Stopped anywhere and started again, a run ends with the same bits as one that was never disturbed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import PLAIN, Counting, differences, let_go, lost_or_repeated, make, samples, settings, train, truth
from ranks import on_ranks

from pipeline.config import Config
from pipeline.distributed.step_sync import TrainingStopped
from pipeline.distributed.world import World
from pipeline.training.build import build
from pipeline.training.trainer import Trainer


class Places:
    """Asks for a stop at the first beat at which `here` holds."""

    def __init__(self, trainer: Trainer, here: Callable[[Trainer], bool]) -> None:
        self.trainer, self.here, self.asked = trainer, here, False

    @property
    def reason(self) -> str | None:
        self.asked = self.asked or self.here(self.trainer)
        return "the test wants it" if self.asked else None


STOPS: dict[str, Callable[[Trainer], bool]] = {
    "warm-up": lambda t: t.position.stage == 0 and t.position.step == 2,
    "end of warm-up": lambda t: t.position.stage == 0 and t.position.step == 3,
    "first survey": lambda t: t.position.stage == 1 and not t.position.epoch_started,
    "epoch 0": lambda t: t.position.stage == 1 and t.position.step == 2,
    "epoch 0, the next step": lambda t: t.position.stage == 1 and t.position.step == 3,
    "last step of epoch 0": lambda t: t.position.stage == 1 and t.position.step == 5,
    "survey after epoch 0": lambda t: t.position.stage == 1 and t.position.pass_index == 1 and t.next_survey is None,
    "evaluation after epoch 0": lambda t: t.position.stage == 1 and t.position.pass_index == 1 and t.next_survey is not None,
    "first step of epoch 1": lambda t: t.position.epoch == 1 and t.position.step == 1,
    "evaluation after epoch 1": lambda t: t.position.epoch == 1 and t.position.pass_index == 1 and t.next_survey is not None,
}  # fmt: skip


def test_stopped_in_every_phase_the_run_loses_nothing(small: str, output: Path, undisturbed: Path, count: int) -> None:
    config = settings(small, output)
    for name, here in STOPS.items():
        trainer = make(config)
        trainer.step_sync.stop_source = Places(trainer, here)
        with pytest.raises(TrainingStopped):
            trainer.run()
        trainer.checkpoints.close()
        assert here(trainer), name  # it stopped there, and not somewhere later
    train(config)
    assert differences(truth(undisturbed), truth(output)) == []
    assert samples(output) == samples(undisturbed)
    assert lost_or_repeated(output, count) == []


class Crash(Exception):
    pass


def test_after_a_crash_only_work_is_repeated_never_samples(
    small: str, output: Path, undisturbed: Path, count: int
) -> None:
    """No farewell save: it goes on from a checkpoint some steps back, in the middle of an epoch."""
    config = settings(small, output, "checkpoint.every_steps=2")

    def crash_at(steps: int) -> Callable[[Trainer], None]:
        def prepare(trainer: Trainer) -> None:
            log = trainer.on_batch

            def die(at: Any, batch: Any) -> None:
                assert log
                log(at, batch)
                if at.global_step == steps:
                    raise Crash

            trainer.on_batch = die

        return prepare

    for steps in (2, 7, 11):
        with pytest.raises(Crash):
            train(config, prepare=crash_at(steps))
    train(config)
    assert differences(truth(undisturbed), truth(output)) == []
    assert lost_or_repeated(output, count) == []


def test_the_clock_may_jump_and_restarts_may_share_a_second(
    small: str, output: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + (86_400 if next(calls) % 2 else -86_400))
    config = settings(small, output, "checkpoint.every_minutes=1000", "train.deadline_minutes=1000")
    train(config, stop_at=9)
    train(config, stop_at=1)
    train(config)
    assert differences(truth(undisturbed), truth(output)) == []


def test_started_again_after_the_end_nothing_is_trained(undisturbed: Path, small: str) -> None:
    before = truth(undisturbed)
    _, beats = train(settings(small, undisturbed))
    assert beats == 0
    assert differences(before, truth(undisturbed)) == []


# -- on several ranks ------------------------------------------------------------------------------


def leg(world: World, config: Config, stop_at: int) -> str:
    """Train on these ranks until the given beat, or to the end."""
    trainer = build(config, world)
    trainer.step_sync.stop_source.close()
    trainer.step_sync.stop_source = Counting(stop_at if world.rank == world.size - 1 else 0)  # the last rank is asked
    with contextlib.suppress(TrainingStopped):
        trainer.run()
    trainer.checkpoints.close()
    let_go()
    return str(trainer.position)


@pytest.mark.dist
def test_two_ranks_stop_together_and_go_on_bit_for_bit(small: str, tmp_path: Path, count: int) -> None:
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    for place in (calm, disturbed):
        place.mkdir()
    on_ranks(2, leg, settings(small, calm), 0)
    for stop_at in (2, 9, 17, 0):  # warm-up, epoch 0, evaluation
        one, other = on_ranks(2, leg, settings(small, disturbed), stop_at)
        assert one == other
    assert differences(truth(calm), truth(disturbed)) == []
    assert samples(calm) == samples(disturbed)
    assert lost_or_repeated(disturbed, count) == []


@pytest.mark.dist
def test_on_another_number_of_ranks_the_sequence_of_samples_is_the_same(small: str, tmp_path: Path, count: int) -> None:
    """2 ranks, then 1 with more threads, then 3, which divide neither batch nor data; all inside an epoch."""
    reference, output = tmp_path / "reference", tmp_path / "run"
    for place in (reference, output):
        place.mkdir()
    train(settings(small, reference, base=PLAIN))
    threads = ["data.threads=1", "data.threads=3", "data.threads=2"]
    for size, stop_at, words in zip((2, 1, 3), (2, 2, 0), threads):
        on_ranks(size, leg, settings(small, output, words, base=PLAIN), stop_at)
        if stop_at:  # so that ranks of the next leg do not find lines of ranks that are no more
            merge_logs(output)
    merge_logs(output)
    assert {at: sorted(seen) for at, seen in samples(output).items()} == {
        at: sorted(seen) for at, seen in samples(reference).items()
    }
    assert lost_or_repeated(output, count) == []


def merge_logs(output: Path) -> None:
    """Give the lines of a leg a name of their own."""
    for file in list(output.glob("samples-rank?.jsonl")):
        file.rename(output / f"samples-rank{file.stem[-1]}-{time.monotonic_ns()}.jsonl")
