"""DeepSpeed does what the plain engine does, at every ZeRO stage; what one saves the other goes on from.

Starting DeepSpeed is slow: two ranks are started once, do everything, and the tests judge the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_bench import Bench, apart, copied, make_trainer, poisoned, same, small
from ranks import on_ranks, worker_env
from torch import Tensor

from pipeline.distributed.step_sync import StepSync, TrainingStopped
from pipeline.distributed.world import World
from pipeline.engines.deepspeed import DeepSpeedEngine, LossScale, _own_settings
from pipeline.evaluation.accuracy import evaluate
from pipeline.models.precision import autocast_for
from pipeline.training.trainer import Trainer
from shards.base.errors import UserError

pytestmark = pytest.mark.timeout(600)  # the first test waits for everything
ZERO = (0, 1, 2, 3)
METHODS = ("cross_entropy", "prototypical")
ALL = [{"engine": "ddp"}, *({"engine": "deepspeed", "deepspeed": {"stage": stage}} for stage in ZERO)]
NAMES = ("ddp", *ZERO)
PRECISIONS = [
    (0, "fp32"),
    (0, "fp16"),
    (1, "fp32"),
    (2, "fp32"),
    (2, "bf16"),
    (2, "fp16"),
    (3, "fp32"),
    (3, "bf16"),
    (3, "fp16"),
]
TINY = {"data": {"batch": 16}, "model": {"width": 4}}


class StopAfter:
    def __init__(self, steps: int) -> None:
        self.steps, self.trainer = steps, None

    @property
    def reason(self) -> str | None:
        return "enough" if self.trainer is not None and self.trainer.position.global_step >= self.steps else None


def train(
    world: World, url: str, folder: Path, stop_after: int = 0, method: str = "prototypical", **settings: Any
) -> Trainer:
    """Through the real trainer to the end, or until it is asked to stop."""
    stop_source = StopAfter(stop_after) if stop_after else None
    trainer = make_trainer(world, url, str(folder), small(method, **settings), stop_source)
    if stop_source:
        stop_source.trainer = trainer
        with pytest.raises(TrainingStopped):
            trainer.run()
    else:
        trainer.run()
    return trainer


def whole_epochs(world: World, url: str, folder: Path) -> dict[str, Any]:
    found = {}
    for method in METHODS:
        for name, engine in zip(NAMES, ALL):
            trainer = train(world, url, folder / f"{method}-{name}", method=method, **engine)
            found[method, name] = copied(trainer.method.state_dict()), trainer.history[-1]["test/top1"]
    return found


def with_everything(world: World, url: str, engine: dict[str, Any]) -> dict[str, Tensor]:
    """Accumulation, clipping, a moving average, batch statistics, parts that pause and come back."""
    model = {"width": 4, "norm": "batch", "ema": 0.5}
    config = small(data={"batch": 48}, optim={"clip": 0.5, "accumulate": 2}, model=model, **engine)
    bench = Bench(world, url, config)
    bench.steps(96)
    bench.engine.set_trainable(("network.head",))
    bench.steps(48, order_key=1)
    bench.engine.set_trainable(("",))
    bench.steps(48, order_key=2)
    return bench.weights()


def nonfinite_steps(world: World, url: str, engine: dict[str, Any], precision: str) -> dict[str, Any]:
    """A NaN on the last rank only, after a good step and before another."""
    bench = Bench(world, url, small(**TINY, **engine, train={"precision": precision}, optim={"clip": 1.0}))
    state = bench.engine.optimizer_state_dict()
    bench.engine.load_optimizer_state_dict(
        {**state, "scaler": {**state["scaler"], "scale": 512.0} if state["scaler"] else {}}
    )
    seed = bench.weights()
    bench.steps(16)
    start, momentum = bench.weights(), copied(bench.engine.optimizer_state_dict()["momentum"])
    scale = bench.engine.optimizer_state_dict()["scaler"].get("scale")
    for batch in bench.batches(16, 1):
        bench.engine.step(poisoned(batch) if world.rank else batch, 0.05)
    found: dict[str, Any] = {
        "skipped": same(start, bench.weights()) and same(momentum, bench.engine.optimizer_state_dict()["momentum"])
    }
    found["counted"] = bench.engine.nonfinite_steps()
    found["scale"] = (scale, bench.engine.optimizer_state_dict()["scaler"].get("scale"))
    bench.steps(16, order_key=2)
    found["counted after"] = bench.engine.nonfinite_steps()
    found["weights"] = bench.weights()
    found["moved"] = torch.cat([(found["weights"][name] - seed[name]).flatten() for name in seed])
    return found


def uneven_evaluation(world: World, url: str, settings: str) -> tuple[dict[str, float], dict[str, float]]:
    """Under ZeRO-3 with every weight cut up; the first rank has one batch of pictures, the second five."""
    bench = Bench(world, url, small(**TINY, engine="deepspeed", deepspeed={"config": settings}))
    bench.steps(16)
    given = bench.train.given[:96]
    images = torch.randn(96, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    index = torch.arange(96)
    mine = slice(0, 16) if world.rank == 0 else slice(16, 96)

    def judged(idle: Any) -> dict[str, float]:
        batches = zip(index[mine].split(16), images[mine].split(16))
        counts = bench.train.clean_counts
        off = autocast_for("fp32", world.device)
        return evaluate(bench.method, "test", batches, given, counts, world, StepSync(world), off, idle).metrics

    assert bench.engine.inner.optimizer.persistent_parameters == []  # type: ignore[attr-defined]
    cut = judged(bench.engine.dummy_forward)
    bench.steps(16, order_key=1)
    bench.steps(16, order_key=2)
    bench.engine.load_model_state_dict(copied(bench.engine.model_state_dict()))  # and whole again
    assert all(p.numel() for p in bench.method.parameters())
    whole = judged(bench.engine.dummy_forward)
    bench.steps(16, order_key=3)
    cut_again = judged(bench.engine.dummy_forward)
    bench.engine.close()
    assert judged(lambda look: None) == cut_again
    return cut, whole


def everything(world: World, url: str, folder: Path, settings: str) -> dict[str, Any]:
    found: dict[str, Any] = {"epochs": whole_epochs(world, url, folder)}
    found["everything"] = [with_everything(world, url, engine) for engine in ALL]
    found["bad"] = {
        (stage, precision): nonfinite_steps(world, url, ALL[stage + 1], precision) for stage, precision in PRECISIONS
    }
    found["uneven"] = uneven_evaluation(world, url, settings)
    train(world, url, folder / "wandering", 4, **ALL[3])
    return found


@pytest.fixture(scope="module")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    from shards.build import ensure
    from shards.config import BuildConfig

    return ensure(BuildConfig(output=str(tmp_path_factory.mktemp("few") / "digits"), rho=50))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def found(few_digits: str, folder: Path) -> list[dict[str, Any]]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer  # here once, rather than in every forked rank

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    own = folder / "zero3.json"
    own.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    return on_ranks(2, everything, few_digits, folder, str(own))


@pytest.mark.dist
@pytest.mark.parametrize("stage", ZERO)
@pytest.mark.parametrize("method", METHODS)
def test_whole_epochs_end_with_the_weights_and_the_accuracy_of_ddp(found: Any, method: str, stage: int) -> None:
    for of_rank in found:
        (weights, accuracy), (expected, expected_accuracy) = (
            of_rank["epochs"][method, stage],
            found[0]["epochs"][method, "ddp"],
        )
        assert apart(weights, expected) < 1e-3
        assert accuracy == pytest.approx(expected_accuracy, abs=1.0)


@pytest.mark.dist
@pytest.mark.parametrize("stage", ZERO)
def test_accumulation_clipping_average_statistics_and_pauses_give_what_ddp_gives(found: Any, stage: int) -> None:
    expected = found[0]["everything"][0]
    assert not torch.equal(expected["network.head.weight"], expected["average.network.head.weight"])
    for of_rank in found:
        weights = of_rank["everything"][stage + 1]
        assert apart(weights, expected) < 1e-3


@pytest.mark.dist
@pytest.mark.parametrize(("stage", "precision"), PRECISIONS)
def test_a_gradient_that_is_not_finite_is_skipped_by_all_ranks(found: Any, stage: int, precision: str) -> None:
    for of_rank in found:
        result = of_rank["bad"][stage, precision]
        assert result["skipped"]
        assert (result["counted"], result["counted after"]) == (1, 0)
        assert same(result["weights"], found[0]["bad"][stage, precision]["weights"])
        assert result["scale"] == ((512, 256) if precision == "fp16" else (None, None))


@pytest.mark.dist
@pytest.mark.parametrize(("stage", "precision"), PRECISIONS)
def test_half_precision_goes_where_full_precision_goes(found: Any, stage: int, precision: str) -> None:
    moved, expected = found[0]["bad"][stage, precision]["moved"], found[0]["bad"][0, "fp32"]["moved"]
    near = 0.7 if precision == "bf16" else 0.99  # plain torch with bf16's eight bits comes as near as 0.8 here
    assert torch.cosine_similarity(moved, expected, dim=0) > near
    assert float(moved.norm()) == pytest.approx(float(expected.norm()), rel=0.2 if precision == "bf16" else 0.02)


@pytest.mark.dist
def test_ranks_without_pictures_keep_company_under_zero3(found: Any) -> None:
    for of_rank in found:
        assert of_rank["uneven"] == found[0]["uneven"]
        cut, whole = of_rank["uneven"]
        assert cut.keys() == whole.keys()


@pytest.mark.dist
def test_a_training_wanders_from_zero2_on_two_ranks_to_ddp_on_one_and_back_to_zero3(
    found: Any, few_digits: str, folder: Path
) -> None:
    alone = train(World(), few_digits, folder / "wandering", 6, engine="ddp")
    assert alone.position.global_step == 6
    ended = on_ranks(2, finish_wandering, few_digits, folder)
    expected, _ = found[0]["epochs"]["prototypical", "ddp"]
    for weights in ended:
        assert apart(weights, expected) < 1e-3


def finish_wandering(world: World, url: str, folder: Path) -> dict[str, Tensor]:
    return copied(train(world, url, folder / "wandering", **ALL[4]).method.state_dict())


@pytest.mark.dist
def test_the_command_trains_on_one_rank_without_torchrun(few_digits: str, tmp_path: Path) -> None:
    words = [f"shards.url={few_digits}", f"output={tmp_path}", "engine=deepspeed", "deepspeed.stage=2",
             "method.name=cross_entropy", "train.epochs=1", "data.size=8", "model.width=4", "tracking.uri=",
             "tracking.log_model=false"]  # fmt: skip
    command = [sys.executable, "-m", "pipeline.train", *words]
    ended = subprocess.run(command, env=worker_env(), capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["epochs"] == 1
    assert "DeepSpeed" not in ended.stdout + ended.stderr
    assert "Warning" not in ended.stderr


# -- without ranks -------------------------------------------------------------------------------------------


def test_a_missing_package_is_told_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UserError, match=r"pip install evenhand\[deepspeed\]"):
        DeepSpeedEngine(small(engine="deepspeed"), None, World())  # type: ignore[arg-type]


def test_own_settings_win_but_leave_to_us_what_they_call_auto(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"train_batch_size": "auto", "fp16": {"enabled": False},
                               "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}))  # fmt: skip
    assert _own_settings(str(own)) == {"fp16": {"enabled": False}, "zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"train_batch_size": 32}', "data.batch"),
        ('{"optimizer": {"type": "Adam"}}', "optim"),
        ('{"bf16": {"enabled": true}}', "train.precision=bf16"),
        ("{", "is not JSON"),
        ("[]", "one JSON object"),
        (None, "cannot be read"),
    ],
)
def test_own_settings_that_cannot_be_used_are_refused(tmp_path: Path, text: str | None, says: str) -> None:
    own = tmp_path / "own.json"
    if text is not None:
        own.write_text(text)
    with pytest.raises(UserError, match=says):
        _own_settings(str(own))


def test_the_loss_scale_follows_the_rule_of_torch_and_shares_its_state() -> None:
    ours, theirs = LossScale(enabled=True), torch.amp.GradScaler("cpu", growth_interval=3)
    ours.load_state_dict(theirs.state_dict())
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    for good in (True, False, True, True, True, False, False, True, True, True, True):
        weight.grad = torch.tensor([1.0 if good else np.inf])
        theirs.scale(weight)
        theirs.step(optimizer)
        theirs.update()
        ours.update(good)
        assert ours.state_dict() == theirs.state_dict()
