"""`latent` as a method: what it believes, what it writes into the head, and what must not change it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from rivals import Course, Pictures, make_method, small_config, survey_of

from pipeline.config import Config
from pipeline.distributed.world import World
from pipeline.methods.latent import Latent, fit_on_features
from pipeline.methods.parts.cross_fitting import FOLDS, calibrate, out_of_fold_scores, stratified_folds
from pipeline.methods.parts.survey import Survey
from pipeline.training.build import build
from shards.base.errors import UserError


def clouds(classes: int, samples: int, noise: float, seed: int = 0) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Features of Gaussian classes, the first the largest; true and given labels."""
    rng = np.random.default_rng(seed)
    true = (rng.random(samples) ** 1.5 * classes).astype(np.int32)
    centre = rng.normal(size=(classes, 8)) * 2
    x = torch.from_numpy(centre[true] + rng.normal(size=(samples, 8)))
    wrong = rng.random(samples) < noise
    return x, true, np.where(wrong, (true + rng.integers(1, classes, samples)) % classes, true).astype(np.int32)


def fitted(x: torch.Tensor, given: np.ndarray, classes: int, **model: Any) -> Latent:
    """The method after its only epoch has begun, on features that no network made."""
    method = make_method(small_config({"name": "latent"}, model={"width": 1, **model}), given, classes)
    assert isinstance(method, Latent)
    assert method.network.features == x.shape[1]
    method.begin_epoch(survey_of({"features": x}))
    return method


# -- what it finds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 4])
def test_wrong_labels_are_found_and_replaced_and_the_head_classifies(classes: int) -> None:
    x, true, given = clouds(classes, 400, 0.3)
    method = fitted(x, given, classes)
    beliefs, wrong = method.beliefs, given != true
    assert ((~beliefs.clean.numpy()) == wrong).mean() > 0.93
    assert beliefs.extra["estimated_noise"] == pytest.approx(wrong.mean(), abs=0.05)
    assert (beliefs.label.numpy() != true).mean() < 0.4 * wrong.mean()
    assert (beliefs.weight.numpy() <= 1).all()
    predicted = method.network.head(x.float()).argmax(1).numpy()
    assert (predicted == true).mean() > 0.93


def test_a_label_is_replaced_only_where_another_is_likely_enough() -> None:
    x, _, given = clouds(4, 300, 0.3)
    method = fitted(x, given, 4)
    changed = method.refined.numpy() != given
    assert changed.any()
    assert float(method.weight[changed].min()) > method.options.relabel_above
    assert torch.equal(method.weight[~changed], method.score[~changed])


def test_the_head_has_the_calibrated_scores_of_the_fitted_classifier() -> None:
    x, _, given = clouds(4, 300, 0.3)
    method = fitted(x, given, 4, ema=0.9)
    fold = torch.from_numpy(stratified_folds(given, method.data.seed))
    classifier, _ = fit_on_features(x, torch.from_numpy(given).long(), fold, 4, method.options.components, World())
    for network in (method.network, method.eval_network):
        assert torch.allclose(network.head(x.float()), classifier(x).float(), atol=1e-3)
    confidence = classifier(x).softmax(1).max(1).values
    assert 0.8 < float(confidence.mean()) < 1


def test_a_picture_of_no_class_has_an_improbable_label() -> None:
    """Between all classes the label may be as likely as any other, but none is to be expected."""
    x, _, given = clouds(4, 400, 0.1)
    x[:20] = x.mean(0)
    method = fitted(x, given, 4)
    assert float(method.predictive[:20].median()) < 0.7 * float(method.predictive[20:].median())


# -- cross-fitting -------------------------------------------------------------------------------------------------


def test_no_sample_is_judged_by_its_own_label() -> None:
    """With the folds as they are, another label changes the scores of other samples but not its own."""
    x, _, given = clouds(3, 120, 0.3)
    label, fold = torch.from_numpy(given).long(), torch.from_numpy(stratified_folds(given, 0))
    before = out_of_fold_scores(x, label, fold, 3, World())
    label[7] = (label[7] + 1) % 3
    after = out_of_fold_scores(x, label, fold, 3, World())
    for old, new in zip(before, after):
        same = fold == fold[7]
        assert torch.equal(old[7], new[7])
        assert torch.equal(old[same], new[same])
        assert not torch.equal(old[~same], new[~same])


def test_folds_are_stratified_and_depend_on_seed_and_labels_alone() -> None:
    given = np.repeat(np.arange(5), [103, 52, 11, 3, 1]).astype(np.int32)
    fold = stratified_folds(given, 3)
    for k in range(5):
        counts = np.bincount(fold[given == k], minlength=FOLDS)
        assert counts.max() - counts.min() <= 1
    assert np.array_equal(fold, stratified_folds(given.copy(), 3))
    assert not np.array_equal(fold, stratified_folds(given, 4))


def test_the_shift_makes_balanced_predictions() -> None:
    """Scores that favour one class by a constant are put right."""
    x, true, given = clouds(3, 900, 0.2)
    label = torch.from_numpy(given).long()
    fold = torch.from_numpy(stratified_folds(given, 0))
    scores = out_of_fold_scores(x, label, fold, 3, World())
    biased = [part + torch.tensor([0.0, 0.0, 6.0]) for part in scores]
    share = []
    for part in (scores, biased):
        chosen = calibrate(part, label, World()).join(part).argmax(1).numpy()
        share.append([(chosen[true == k] == k).mean() for k in range(3)])
    assert np.allclose(share[0], share[1], atol=0.03)


# -- ranks, restarts, poor data ------------------------------------------------------------------------------------


def on_rank(world: World, samples: int) -> dict[str, torch.Tensor]:
    run = Course(small_config({"name": "latent"}), Pictures(samples), world=world, double=True)
    assert list(run.steps()) == []
    return run.state()["method"]


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_compute_what_one_computes(size: int) -> None:
    alone, ranks = on_rank(World(), 47), on_ranks(size, on_rank, 47)
    for name, value in alone.items():
        assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks), name
        gap = (ranks[0][name].double() - value.double()).abs().max()
        assert gap <= 1e-6 * max(1.0, float(value.double().abs().max())), name


def test_two_runs_agree_to_the_bit_and_a_finished_run_resumes_finished() -> None:
    config = small_config({"name": "latent"})
    first, second, resumed = Course(config), Course(config), Course(config)
    for run in (first, second):
        assert list(run.steps()) == []
        assert len(run.trainer.history) == 1
    resumed.load(first.state())
    list(resumed.steps())
    assert len(resumed.trainer.history) == 1
    for run in (second, resumed):
        state = run.state()["method"]
        assert all(torch.equal(state[name], value) for name, value in first.state()["method"].items())


@pytest.mark.parametrize(
    "given",
    [[0], [0, 1], [0] * 30 + [1], [0] * 20 + [1] * 3 + [2] * 2, [2] * 12, [0, 1, 2] * 2],
    ids=["one", "two", "one of a class", "fewer than folds", "one class of three", "two of each"],
)
@pytest.mark.parametrize("equal", [False, True], ids=["features", "constant features"])
def test_poor_data_gives_finite_answers(given: list[int], equal: bool) -> None:
    label = np.array(given, np.int32)
    x = torch.ones(len(label), 8) if equal else torch.randn(len(label), 8, generator=torch.Generator().manual_seed(0))
    method = fitted(x, label, 3)
    state = [value for value in method.state_dict().values() if value.is_floating_point()]
    assert all(torch.isfinite(value).all() for value in state)
    assert (method.score >= 0).all()
    assert (method.score <= 1 + 1e-6).all()


def test_features_that_are_not_finite_are_refused_with_a_sentence() -> None:
    x, _, given = clouds(3, 40, 0.2)
    x[11, 2] = torch.nan
    with pytest.raises(UserError, match=r"features of 1 samples are not finite, among them sample 11\. Check"):
        fitted(x, given, 3)


def refused(world: World) -> str:
    x, _, given = clouds(3, 40, 0.2)
    x[11, 2] = torch.inf
    own = world.rank_slice(40)
    method = make_method(small_config({"name": "latent"}, model={"width": 1}), given, 3, world)
    with pytest.raises(UserError) as error:
        method.begin_epoch(Survey(torch.arange(40)[own], {"features": x[own]}, 40, world))
    return str(error.value)


@pytest.mark.dist
def test_all_ranks_refuse_what_one_refuses() -> None:
    assert len(set(on_ranks(2, refused))) == 1


def test_deepspeed_is_refused_with_a_sentence() -> None:
    config = small_config({"name": "latent"}).model_copy(update={"engine": "deepspeed"})
    with pytest.raises(UserError, match="Set engine=ddp"):
        make_method(config, Pictures().given, 3)


def test_a_run_writes_everything_a_run_writes(digits: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From shards to metrics: one epoch without a step, whatever train.epochs says."""
    settings = {
        "output": str(tmp_path), "shards": {"output": digits}, "tracking": {"uri": ""}, "train": {"epochs": 8},
        "data": {"batch": 32, "size": 8, "padding": 1, "augmix": "none", "threads": 1}, "model": {"width": 8},
        "method": {"name": "latent"},
    }  # fmt: skip
    trainer = build(Config.model_validate(settings), World())
    with caplog.at_level("INFO"):
        trainer.run()
    trainer.checkpoints.close()
    assert "epoch 1 of 1  top1" in caplog.text
    assert "img/s" not in caplog.text  # nothing was trained
    (metrics,) = trainer.history
    assert metrics["clean/auc"] > 0.8
    assert metrics["clean/noise_after"] < metrics["clean/noise_before"]
    assert 0.3 < metrics["clean/estimated_noise"] < 0.7
    assert not [name for name in metrics if name.startswith(("loss/", "time/images"))]
