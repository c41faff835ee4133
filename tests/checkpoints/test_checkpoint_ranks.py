"""All ranks continue from the same checkpoint, or none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks

from pipeline.checkpoints.checkpointer import Checkpointer
from pipeline.checkpoints.run_lock import lock
from pipeline.distributed.world import World
from shards.base.errors import UserError

pytestmark = pytest.mark.dist


def test_two_ranks_load_the_newest_good_one_though_only_the_lead_can_see_it(tmp_path: Path) -> None:
    def work(world: World) -> Any:
        # Every rank has its own folder, as on machines without a common disk; only the lead's is ever used.
        checkpointer = Checkpointer(str(tmp_path / f"disk-{world.rank}"), 3, world)
        assert checkpointer.load() is None
        weight = torch.arange(300_000.0)
        for step in (1, 2):
            checkpointer.save(
                step, {"weight": weight * step, "lr": 0.1, "nan": float("nan")}, best=step == 1, wait=True
            )
        if world.is_main:
            (tmp_path / "disk-0" / "step-000000002" / "state.json").write_text("{}")
        world.barrier()
        loaded, best = checkpointer.load(), checkpointer.best()
        assert loaded is not None
        assert best is not None
        assert torch.equal(loaded.tree["weight"], weight)
        return [loaded.name, loaded.rejected, loaded.tree["lr"], best.name]

    one, other = on_ranks(2, work)
    assert one == other
    assert one[0] == one[3] == "step-000000001"
    assert "step-000000002 is not used" in one[1][0]
    assert not (tmp_path / "disk-1").exists()


def test_a_refusal_is_heard_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("in the way")

    def work(world: World) -> list[str]:
        heard = []
        for attempt in (
            lambda: Checkpointer(str(tmp_path / "a file" / "x"), 2, world).check_writable(),
            lambda: lock(tmp_path / "a file" / "x", world),
            lambda: Checkpointer(str(tmp_path / "bad"), 2, world).load(),
        ):
            if world.is_main:
                (tmp_path / "bad" / "step-000000001").mkdir(parents=True, exist_ok=True)
            try:
                attempt()
            except UserError as error:
                heard.append(str(error))
        return heard

    one, other = on_ranks(2, work)
    assert one == other
    assert len(one) == 3
