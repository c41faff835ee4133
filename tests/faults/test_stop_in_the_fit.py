"""`latent` fits its classifier in one epoch without steps: a stop is noticed inside, and the next start ends the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import PLAIN, differences, let_go, newest, settings, truth
from ranks import on_ranks

from pipeline.config import Config
from pipeline.distributed.world import World
from pipeline.methods.parts import logistic_regression, transition
from pipeline.train import train
from pipeline.training.build import build

LATENT = [word for word in PLAIN if not word.startswith("method.")] + ["method.name=latent"]


class InTheFit:
    """Asks for a stop at the n-th beat since the fit began; 0 for never."""

    def __init__(self, method: Any, stop_at: int) -> None:
        self.stop_at, self.beats, self.begun = stop_at, 0, False
        begin = method.begin_epoch

        def noted(survey: Any) -> None:
            self.begun = True
            begin(survey)
            self.begun = False

        method.begin_epoch = noted

    @property
    def reason(self) -> str | None:
        self.beats += self.begun
        return "the test wants it" if self.begun and self.beats == self.stop_at else None


def leg(world: World, config: Config, stop_at: int) -> tuple[int, int]:
    """The exit code and the beats of the fit; the last rank is asked to stop."""
    Path(config.output).mkdir(parents=True, exist_ok=True)
    trainer = build(config, world)
    trainer.step_sync.stop_source.close()  # type: ignore[union-attr]
    source = InTheFit(trainer.method, stop_at if world.rank == world.size - 1 else 0)
    trainer.step_sync.stop_source = source
    code = 0
    if stop_at:
        code = train(trainer)
    else:  # without the files of a finished run, which take longest
        trainer.run()
        trainer.checkpoints.close()
    let_go()
    return code, source.beats


@pytest.fixture
def short_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rounds of the same work."""
    monkeypatch.setattr(logistic_regression, "STEPS", 3)
    monkeypatch.setattr(transition, "STEPS", 2)
    monkeypatch.setattr(transition, "GRID", [1.0, 2.0])
    monkeypatch.setattr(transition, "REFINEMENTS", ())


@pytest.mark.dist
@pytest.mark.usefixtures("short_fit")
@pytest.mark.parametrize("size", [1, 2])
def test_stopped_inside_the_fit_the_next_start_ends_the_same(small: str, tmp_path: Path, size: int) -> None:
    calm, disturbed = (settings(small, tmp_path / name, base=LATENT) for name in ("calm", "disturbed"))
    ((code, beats), *_) = on_ranks(size, leg, calm, 0)
    assert code == 0
    for stop_at in (1, beats):  # components, the last classifier
        assert on_ranks(size, leg, disturbed, stop_at) == [(75, stop_at)] * size  # there, and not somewhere later
        saved: Any = newest(tmp_path / "disturbed").tree
        assert not saved["position"]["epoch_started"]
        assert torch.equal(saved["method"]["score"], torch.ones_like(saved["method"]["score"]))  # nothing half done
    assert on_ranks(size, leg, disturbed, 0) == [(0, beats)] * size
    assert differences(truth(tmp_path / "calm"), truth(tmp_path / "disturbed")) == []
