"""Steps, surveys and evaluation run ahead of the device: no tensor is read by the host in them, for any method."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rivals import Course, Pictures
from test_rivals_together import METHODS, config_of
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.data.batch import TrainingSet
from pipeline.evaluation.accuracy import _count

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
# CPU tensors; and once per block of a search among all samples, which takes far longer than the read
MAY_READ = {("step_sync.py", "sync"), ("nearest_neighbors.py", "_top")}


class HostReads(TorchDispatchMode):
    """Notes the line of ours that asks for the value of a tensor, or for as many rows as a mask has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = func in INDEXING and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if func in READS or masks:
            self._note()
        return func(*args, **(kwargs or {}))

    def _note(self) -> None:
        frame: Any = sys._getframe()
        while frame and "/pipeline/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None:
            return
        file, line = frame.f_code.co_filename, linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if "one_hot(" in line:  # checks its labels on CPUs only
            return
        if (Path(file).name, frame.f_code.co_name) not in MAY_READ:
            self.found.add(f"{Path(file).name}:{frame.f_lineno} {line.strip()}")


@contextmanager
def watched(owner: Any, names: tuple[str, ...]) -> Iterator[set[str]]:
    """What is read while one of these functions runs."""
    mode = HostReads()

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return function(*args, **kwargs)

        return inside

    for name in names:
        setattr(owner, name, wrap(getattr(owner, name)))
    yield mode.found


@pytest.mark.parametrize("name", METHODS)
def test_steps_surveys_and_evaluation_read_nothing_back(name: str) -> None:
    run = Course(config_of(name))
    with (
        watched(run.trainer.engine, ("step",)) as in_steps,
        watched(run.trainer, ("_survey", "evaluate_all")) as between,
    ):
        for _ in run.steps():
            pass
    assert in_steps == set()
    assert between == set()


def test_what_would_be_read_is_noticed() -> None:
    """The watch itself: a value, a mask and an index without dimensions."""
    run = Course(config_of("cross_entropy"))
    forward, value = run.method.forward, torch.arange(3)
    # Compiled as a file of the pipeline, because only its lines are noted.
    code = compile("float(value[0]); value[value > 1]; value[value[0]]", "/pipeline/example.py", "exec")
    with watched(run.trainer.engine, ("step",)) as found:
        run.method.forward = lambda batch: (exec(code, {"value": value}), forward(batch))[1]  # type: ignore[method-assign]
        next(run.steps())
    assert found


@pytest.mark.parametrize(("classes", "known"), product((3, 7), (0.0, 0.5, 1.0)))
def test_pictures_without_a_known_label_count_for_nothing(classes: int, known: float) -> None:
    """The counts of a batch are those of its pictures with a label alone, whatever the scores of the others."""
    rng = np.random.default_rng(classes)
    label = torch.from_numpy(np.where(rng.random(40) < known, rng.integers(0, classes, 40), -1))
    score = torch.from_numpy(rng.normal(size=(40, classes)))
    score[label < 0] = torch.nan
    counted, alone = (torch.zeros(classes, classes + 3, dtype=torch.float64) for _ in range(2))
    _count(counted, score, label)
    for row in torch.arange(40)[label >= 0]:
        _count(alone, score[row][None], label[row][None])
    assert torch.allclose(counted, alone, rtol=1e-12)
    assert torch.equal(counted[:, : classes + 1], alone[:, : classes + 1])  # whole numbers


def test_labels_are_copied_to_a_device_once_and_stay_as_given() -> None:
    data = TrainingSet(Pictures().given, 3, 0, 16)
    index = torch.tensor([4, 0, 4])
    assert data.labels(index).tolist() == data.given[[4, 0, 4]].tolist()
    assert data.given_on(index.device) is data.given_on(index.device)
    assert not np.shares_memory(data.given_on(index.device).numpy(), data.given)
