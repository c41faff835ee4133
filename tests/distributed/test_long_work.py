"""Ranks wait without limit for one that works, and not for one that is gone."""

from __future__ import annotations

import contextlib
import time

import pytest
from ranks import on_ranks

from pipeline.distributed import long_work
from pipeline.distributed.world import World
from shards.base.errors import Unreachable, UserError

pytestmark = pytest.mark.dist


def waited(world: World) -> list[object]:
    """What a rank gets, or which error it meets, in several turns."""
    long_work.BEAT_SECONDS, long_work.SILENCE_SECONDS = 0.2, 3.0

    def end(call: object, work: object) -> object:
        try:
            return call(work)
        except (UserError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"

    def refuse() -> None:
        raise Unreachable("no answer")

    seen = [
        end(world.on_main, lambda: time.sleep(5) or f"of rank {world.rank}"),  # longer than the silence that is allowed
        end(world.on_main, refuse),
        end(world.each_rank, lambda: f"of rank {world.rank}"),
    ]
    if world.rank == 0:  # as if its machine had stopped
        long_work._signs_of_life = lambda store: contextlib.nullcontext()
    return [*seen, end(world.each_rank, lambda: time.sleep(10 * (world.rank == 0)))]


def test_one_waits_for_work_but_not_for_silence() -> None:
    one, other = on_ranks(2, waited)
    for number, seen in enumerate((one, other)):
        assert seen[:3] == ["of rank 0", "Unreachable: no answer", f"of rank {number}"]
    assert "gave no sign of life for 3 s" in str(other[3])


def failing(world: World, error: Exception) -> str:
    def work() -> None:
        if world.rank == 1:
            raise error

    try:
        world.each_rank(work)
    except (UserError, ValueError, RuntimeError) as met:
        return f"{type(met).__name__}: {met}"
    return "nothing"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("no room."), ["UserError: rank 1: no room.", "UserError: no room."]),
        (ValueError("x"), ["RuntimeError: rank 1: ValueError: x", "ValueError: x"]),
    ],
)
def test_an_error_of_one_rank_ends_the_wait_of_the_others(error: Exception, told: list[str]) -> None:
    assert on_ranks(2, failing, error) == told
