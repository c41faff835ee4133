"""A pass of a stage by steps keeps everything the method said of it, cut to the stage's steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from engine_bench import make_trainer, small

from pipeline.data.batch import Batch, Pass
from pipeline.distributed.world import World
from pipeline.methods.base import Stage


def test_a_stage_by_steps_keeps_trainable_beside_and_learner_of_its_pass(digits: str, tmp_path: Path) -> None:
    trainer = make_trainer(World(), digits, str(tmp_path), small())
    method, seen = trainer.method, list[Batch]()
    beside = np.array([1, 2, 3])
    pass_ = Pass(np.arange(60), ("weak", "weak2"), 16, beside, 4, trainable=("network.head",), learner=1)
    method.stages = lambda: [Stage("short", steps=2, constant_lr=True, trainable=("network.",))]
    method.passes = lambda: [replace(pass_)]
    trainer.on_batch = lambda _, batch: seen.append(batch)
    before = {name: value.clone() for name, value in method.state_dict().items()}
    trainer.run()
    trainer.checkpoints.close()
    assert [batch.index.tolist() for batch in seen] == [list(range(16)), list(range(16, 32))]
    assert [batch.second and batch.second.index.tolist() for batch in seen] == [[1, 2, 3, 1], [2, 3, 1, 2]]
    assert [(batch.learner, batch.second.learner, *batch.views) for batch in seen] == [(1, 1, "weak", "weak2")] * 2
    moved = {name for name, value in method.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"network.head.weight", "network.head.bias"}
