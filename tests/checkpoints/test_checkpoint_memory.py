"""A resume holds a checkpoint once, a rank only its own rows of a table, and afterwards nothing of it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from peak_memory import MB, peak_growth
from ranks import on_ranks

from pipeline.checkpoints import checkpointer
from pipeline.checkpoints.checkpointer import Checkpointer
from pipeline.distributed.world import World
from pipeline.process.torch_settings import keep_freed_memory

TABLE, WEIGHT, WIDTH = 96, 32, MB // 4  # rows of one MB


def tree() -> dict[str, Any]:
    table = torch.arange(float(TABLE))[:, None].expand(TABLE, WIDTH).contiguous()
    kinds = {"short": torch.arange(5, dtype=torch.int16), "flag": torch.tensor(True), "none": torch.zeros(0, 3)}
    return {"method": {"table": table, "weight": torch.ones(WEIGHT, WIDTH), **kinds}}


def write(folder: Path) -> None:
    Checkpointer(str(folder), 2, World()).save(1, tree(), wait=True)


def resume(world: World, folder: str, whole: bool) -> float:
    """Copy a checkpoint into what lies ready; the growth at its peak, in MB."""
    rows = slice(0, TABLE) if whole else world.rank_slice(TABLE)
    table, weight = torch.full((rows.stop - rows.start, WIDTH), -1.0), torch.full((WEIGHT, WIDTH), -1.0)

    def work() -> Any:
        loaded = Checkpointer(folder, 2, world).load(rows=None if whole else {"method/table": rows})
        assert loaded is not None
        method = loaded.tree["method"]
        table.copy_(method["table"][rows] if len(method["table"]) == TABLE else method["table"])
        weight.copy_(method["weight"])
        return {name: method[name].clone() for name in ("short", "flag", "none")}

    others, growth = peak_growth(work)
    assert torch.equal(table[:, 7], torch.arange(float(TABLE))[rows])
    assert (weight == 1).all()
    assert others["short"].tolist() == [0, 1, 2, 3, 4]
    assert others["flag"].item() is True
    assert others["none"].shape == (0, 3)
    gc.collect()
    assert peak_growth(lambda: None)[1] < 1
    return growth


def test_one_rank_holds_a_checkpoint_once(tmp_path: Path) -> None:
    write(tmp_path)
    assert 128 - 2 < on_ranks(1, resume, str(tmp_path), True)[0] < 128 * 1.5


def test_it_does_so_between_pieces_of_freed_memory(tmp_path: Path) -> None:
    """A buffer that grows in a gap which is too small for it (after the tensors of `resume`) would be copied, and exist twice."""
    write(tmp_path)
    keep_freed_memory()
    blocks = [torch.ones(4 * MB // 4) for _ in range(64)]
    last = torch.ones(4 * MB // 4)
    blocks.clear()
    assert on_ranks(1, resume, str(tmp_path), True)[0] < 128 * 1.5
    del last


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_other_ranks_hold_only_the_rows_they_ask_for(tmp_path: Path, ranks: int, monkeypatch) -> None:
    monkeypatch.setattr(checkpointer, "BROADCAST_BYTES", 3 * MB)  # pieces that do not end with a rank's rows
    write(tmp_path)
    first, *others = on_ranks(ranks, resume, str(tmp_path), False)
    assert first < 128 * 1.5
    for growth in others:
        assert WEIGHT + TABLE / ranks - 2 < growth < WEIGHT + TABLE / ranks + 24, growth


def test_what_is_made_for_a_checkpoint_is_written_without_a_copy(tmp_path: Path) -> None:
    saved, target = tree(), Checkpointer(str(tmp_path), 2, World())
    _, growth = peak_growth(lambda: target.save(1, saved, wait=True, uncopied={"method/table"}))
    assert WEIGHT - 2 < growth < WEIGHT + 32
    loaded = target.load()
    assert loaded is not None
    assert torch.equal(loaded.tree["method"]["table"], saved["method"]["table"])
