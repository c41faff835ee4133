"""Stored features: the numbers of the frozen backbone, the same on any number of ranks, and every method trains on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks, on_started_ranks

from launch.sweep import method_names
from pipeline.config import Config
from pipeline.data.batch import Pass
from pipeline.data.loader import Loader
from pipeline.distributed.step_sync import TrainingStopped
from pipeline.distributed.world import World
from pipeline.features import write
from pipeline.features.encoder import pretrained_encoder, stored_encoder
from pipeline.features.write import ensure_features
from pipeline.inference.model import load_exported
from pipeline.inference.open_run import open_run
from pipeline.methods.parts import transition
from pipeline.training import final_outputs
from pipeline.training.build import build
from pipeline.training.trainer import Trainer
from shards.base.errors import UserError
from shards.base.settings import merge
from shards.build import ensure
from shards.config import BuildConfig
from shards.features import FeatureSplit, read_features
from shards.reader import open_split

EARLY: dict[str, dict[str, Any]] = {  # options with which two epochs go through most of a method
    "prototypical": {"warmup_steps": 2, "cleaning_start": 0.5},
    "rrl": {"warmup_steps": 2, "cleaning_start": 0.5, "neighbours": 5},
    "dividemix": {"warmup": 0.5}, "rolt": {"warmup": 0.5}, "sfa": {"warmup": 0.5},
    "dasc": {"warmup": 0.5, "contrast_start": 0.0}, "ssr": {"neighbours": 5}, "pls_lsa": {"wrong_above": 0.5},
    "mopro": {"queue": 64, "cleaning_start": 0.5, "retrain_part": 0.5},
    "crt": {"classifier_part": 0.5}, "har": {"probe_part": 0.5}, "aum": {"probe_part": 0.5},
}  # fmt: skip


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A few digits; ten classes with up to 20 pictures."""
    folder = tmp_path_factory.mktemp("features") / "digits"
    return ensure(BuildConfig(output=str(folder), rho=5, largest=20, noise=0.2), log=lambda text: None)


def config_of(shards: str, output: Path, method: str = "cross_entropy", **sections: Any) -> Config:
    tree = {
        "output": str(output), "shards": {"url": shards}, "tracking": {"uri": "", "system_metrics": False},
        "checkpoint": {"background": False}, "train": {"epochs": 2},
        "data": {"loader": "features", "feature_views": 2, "batch": 32, "size": 8, "padding": 1, "threads": 1},
        "model": {"width": 4, "embedding": 6, "norm": "group", "feature_norm": "batch"}, "optim": {"lr": 0.05},
        "method": {"name": method, **EARLY.get(method, {})},
    }  # fmt: skip
    return Config.model_validate(merge(tree, sections))


@pytest.fixture(scope="module")
def stored(shards: str) -> str:
    return ensure_features(config_of(shards, Path()), shards, World())


def trained(config: Config, world: World | None = None) -> Trainer:
    trainer = build(config, world or World())
    trainer.run()
    trainer.checkpoints.close()
    return trainer


def files_of(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


def read_view(url: str, split: str, view: str) -> np.ndarray:
    about = read_features(url)
    assert about is not None
    part = FeatureSplit(url, split, about)
    out = np.empty((about.splits[split].samples, about.width), np.float16)
    part.read(np.full(len(out), part.views[view]), np.arange(len(out)), out)
    return out


# -- what is stored ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "view"), [("train", "test"), ("test", "test"), ("train", "weak1"), ("train", "strong0")]
)
def test_a_file_holds_what_the_backbone_makes_of_each_view(shards: str, stored: str, split: str, view: str) -> None:
    config = config_of(shards, Path())
    encoder = pretrained_encoder(config, torch.device("cpu"))
    loader = Loader(open_split(shards, split), config.data, 0, World())
    expected = np.concatenate(
        [encoder(batch.views[view]).numpy() for batch in loader.consecutive(slice(0, len(loader.given)), (view,), 7)]
    )
    np.testing.assert_allclose(read_view(stored, split, view).astype(np.float32), expected, rtol=2e-3, atol=1e-4)
    assert len(np.unique(expected, axis=0)) > len(expected) // 2  # pictures give different features


def _ensure(world: World, shards: str, output: str) -> str:
    return ensure_features(config_of(shards, Path(), data={"features": output}), shards, world)


@pytest.mark.dist
def test_ranks_share_the_work_and_write_the_same_bytes(shards: str, stored: str, tmp_path: Path) -> None:
    on_ranks(2, _ensure, shards, str(tmp_path / "two"))
    assert files_of(str(tmp_path / "two")) == files_of(stored)


def test_a_killed_start_is_finished_by_the_next(
    shards: str, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, written = write._Writer._publish, []

    def dying(self: Any, name: str, data: bytes) -> Any:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(name)
        return publish(self, name, data)

    monkeypatch.setattr(write._Writer, "_publish", dying)
    with pytest.raises(KeyboardInterrupt):
        _ensure(World(), shards, str(tmp_path / "again"))
    assert read_features(str(tmp_path / "again")) is None
    monkeypatch.setattr(
        write._Writer, "_publish", lambda self, name, data: (written.append(name), publish(self, name, data))[1]
    )
    _ensure(World(), shards, str(tmp_path / "again"))
    assert len(written) == len(set(written))  # nothing was computed twice
    assert files_of(str(tmp_path / "again")) == files_of(stored)


def test_features_lie_on_any_store(shards: str, stored: str) -> None:
    url = _ensure(World(), shards, "memory://features-test/here")
    np.testing.assert_array_equal(read_view(url, "train", "weak0"), read_view(stored, "train", "weak0"))
    encoder = stored_encoder(config_of(shards, Path()), url, torch.device("cpu"))
    assert encoder.width == read_features(url).width  # type: ignore[union-attr]


def test_the_cost_is_said_before_and_refused_if_the_disk_is_full(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(write.psutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with (
        caplog.at_level("INFO"),
        pytest.raises(UserError, match=r"need .* GB .* free\. Make room, .*data\.feature_views"),
    ):
        _ensure(World(), shards, str(tmp_path / "full"))
    assert "passes through preact_resnet18" in caplog.text
    assert not (tmp_path / "full").exists()


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_features_that_do_not_fit_are_refused(shards: str, stored: str, tmp_path: Path) -> None:
    def refused(match: str, url: str = shards, **sections: Any) -> None:
        with pytest.raises(UserError, match=match):
            ensure_features(config_of(url, tmp_path, **merge({"data": {"features": stored}}, sections)), url, World())

    other = ensure(BuildConfig(output=str(tmp_path / "other"), rho=1, largest=4, noise=0.0), log=lambda text: None)
    refused("made of other shards", url=other)
    refused(r"other settings: data.size=8 \(now 12\)", data={"size": 12})
    refused(r"model.backbone='preact_resnet18' \(now 'resnet10t'\)", model={"backbone": "resnet10t"})
    refused("data.feature_views=2 .now 3", data={"feature_views": 3})
    refused("data.interpolation='bilinear' .now 'bicubic'", data={"interpolation": "bicubic"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("mine")
    refused("holds other files", data={"features": str(tmp_path / "full")})


def test_bicubic_features_have_a_place_of_their_own_and_bilinear_ones_stay(shards: str, stored: str) -> None:
    cubic = config_of(shards, Path(), data={"interpolation": "bicubic"})
    about, before = read_features(ensure_features(cubic, shards, World())), read_features(stored)
    assert about is not None
    assert before is not None
    assert about.recipe["interpolation"] == "bicubic"
    assert "interpolation" not in before.recipe  # as features were described before there was the setting
    write.check_fit(about, cubic, shards)
    with pytest.raises(UserError, match=r"data.interpolation='bicubic' .now 'bilinear'"):
        write.check_fit(about, config_of(shards, Path()), shards)


@pytest.mark.parametrize("damage", ["flip", "cut", "manifest"])
def test_damaged_features_are_refused(shards: str, stored: str, tmp_path: Path, damage: str) -> None:
    copy = shutil.copytree(stored, tmp_path / "copy")
    file = copy / ("features.json" if damage == "manifest" else "train-000000.npy")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data[:-2] if damage == "cut" else b"{" if damage == "manifest" else data)
    with pytest.raises(UserError, match=r"altered|bytes instead of|damaged"):
        build(config_of(shards, tmp_path, data={"features": str(copy)}), World())


# -- batches -----------------------------------------------------------------------------------------------------------


def test_views_of_one_kind_differ_and_change_from_epoch_to_epoch(shards: str, stored: str, tmp_path: Path) -> None:
    loader: Any = build(config_of(shards, tmp_path), World()).loader
    order = np.arange(20)

    def views(order_key: int) -> dict[str, np.ndarray]:
        (batch,) = loader.batches(Pass(order, ("weak", "weak2", "strong")), order_key)
        return {name: value.numpy() for name, value in batch.views.items()}

    both = {view: read_view(stored, "train", view)[order].astype(np.float32) for view in ("weak0", "weak1")}
    first, second = views(0), views(8)
    for row in range(len(order)):
        found = {name for name in ("weak", "weak2") for view in both if (first[name][row] == both[view][row]).all()}
        assert found == {"weak", "weak2"}
        if (both["weak0"][row] != both["weak1"][row]).any():
            assert (first["weak"][row] != first["weak2"][row]).any()
    assert (first["weak"] != second["weak"]).any()
    assert all((views(0)[name] == first[name]).all() for name in first)


def test_a_picture_that_does_not_decode_does_not_count(shards: str, tmp_path: Path) -> None:
    url = str(shutil.copytree(shards, tmp_path / "shards", ignore=shutil.ignore_patterns("features-*")))
    split = open_split(url)
    broken, offset = 5, int(split._offset[5])
    tar = Path(url) / split.info.shards[0].name
    data = bytearray(tar.read_bytes())
    data[offset : offset + 40] = bytes(40)
    tar.write_bytes(data)
    manifest = json.loads((Path(url) / "manifest.json").read_text())
    import hashlib

    manifest["splits"]["train"]["shards"][0]["sha256"] = hashlib.sha256(data).hexdigest()
    (Path(url) / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"1 of \d+ pictures of 'train' did not decode.*raise data.max_bad"):
        build(config_of(url, tmp_path / "run", data={"max_bad": 0.0}), World())
    loader: Any = build(config_of(url, tmp_path / "run", data={"max_bad": 0.5}), World()).loader
    (batch,) = loader.batches(Pass(np.array([4, broken, 6])), 0)
    assert batch.valid.tolist() == [1, 0, 1]


# -- training ----------------------------------------------------------------------------------------------------------


def _train_every_method(
    world: World, shards: str, folder: str
) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    found = {}
    for name in method_names():
        trainer = trained(config_of(shards, Path(folder) / name, name), world)
        found[name] = ([past["test/top1"] for past in trainer.history], trainer.method.state_dict())
    return found


@pytest.mark.dist
def test_every_method_trains_on_features_and_ranks_change_nothing(shards: str, stored: str, tmp_path: Path) -> None:
    alone = _train_every_method(World(), shards, str(tmp_path / "one"))
    ranks = on_ranks(2, _train_every_method, shards, str(tmp_path / "two"))
    for name, (_, state) in alone.items():
        for key, value in state.items():
            other = ranks[0][name][1][key]
            if value.is_floating_point() and value.shape == other.shape:
                assert torch.isfinite(value).all(), (name, key)
                gap = (other - value).abs().max() if value.numel() else 0.0
                assert gap <= 3e-3 * max(1.0, float(value.abs().amax()) if value.numel() else 0.0), (
                    name,
                    key,
                )  # in single precision


def _train_with_deepspeed(world: World, shards: str, folder: str, stage: int) -> dict[str, torch.Tensor]:
    sections = {"engine": "deepspeed", "deepspeed": {"stage": stage}}
    return trained(config_of(shards, Path(folder), "prototypical", **sections), world).method.state_dict()


@pytest.mark.dist
@pytest.mark.parametrize("stage", [3])
def test_deepspeed_trains_on_features_as_ddp_does(shards: str, stored: str, tmp_path: Path, stage: int) -> None:
    plain = trained(config_of(shards, tmp_path / "ddp", "prototypical")).method.state_dict()
    (other,) = on_started_ranks(1, _train_with_deepspeed, shards, str(tmp_path / "deepspeed"), stage)
    for name, value in plain.items():
        torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_a_stopped_run_goes_on_to_the_same_bits(shards: str, stored: str, tmp_path: Path) -> None:
    class Stop:
        beats = 0

        @property
        def reason(self) -> str | None:
            self.beats += 1
            return "enough" if self.beats == 7 else None

    whole = trained(config_of(shards, tmp_path / "whole", "prototypical")).method.state_dict()
    config = config_of(shards, tmp_path / "parts", "prototypical")
    trainer = build(config, World())
    trainer.step_sync.stop_source = Stop()
    with pytest.raises(TrainingStopped):
        trainer.run()
    trainer.checkpoints.close()
    again = trained(config).method.state_dict()
    assert all(torch.equal(again[key], value) for key, value in whole.items())
    with pytest.raises(UserError, match=r"model.from_features was True, is False"):
        build(config_of(shards, tmp_path / "parts", "prototypical", data={"loader": "tar"}), World())


# -- what comes out ----------------------------------------------------------------------------------------------------


def test_the_model_carries_the_backbone_and_answers_alike_from_files_and_features(
    shards: str, stored: str, tmp_path: Path
) -> None:
    trainer = trained(config_of(shards, tmp_path / "run", "prototypical"))
    final_outputs.write_final_outputs(trainer, tmp_path / "run")
    split, features = open_split(shards, "test"), torch.from_numpy(read_view(stored, "test", "test")).float()
    with torch.no_grad():
        expected = next(iter(trainer.method.eval().scores(features).values())).softmax(1).numpy()
    pictures = [bytes(split.read(index)) for index in range(len(split))]
    for model in (load_exported(tmp_path / "run" / "model"), open_run(str(tmp_path / "run")).model):
        found = np.stack([answer.scores for answer in model.predict(pictures) if answer.scores is not None])
        np.testing.assert_allclose(found, expected, atol=2e-3)


def test_the_mlflow_model_of_latent_answers_from_pictures_as_the_run_did_from_features(
    shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It carries the backbone, the interpolation, and the classifier: the run's own accuracy on the test pictures."""
    import mlflow
    import pandas as pd

    monkeypatch.setattr(transition, "GRID", [1.0])  # a shorter fit
    monkeypatch.setattr(transition, "REFINEMENTS", ())
    trainer = trained(config_of(shards, tmp_path / "run", "latent", data={"interpolation": "bicubic", "size": 12}))
    final_outputs.write_final_outputs(trainer, tmp_path / "run")
    saved = str(tmp_path / "mlflow")
    mlflow.pyfunc.save_model(
        saved, loader_module="pipeline.exported", data_path=str(tmp_path / "run" / "model"), pip_requirements=["torch"]
    )
    split, features = open_split(shards, "test"), read_view(trainer.features["url"], "test", "test")  # type: ignore[index]
    pictures = [bytes(split.read(index)) for index in range(len(split))]
    table = mlflow.pyfunc.load_model(saved).predict(pd.DataFrame({"image": pictures}))
    with torch.no_grad():
        expected = trainer.method.eval().scores(torch.from_numpy(features).float())["linear"].softmax(1).numpy()
    np.testing.assert_allclose(np.stack(table["scores"]), expected, atol=5e-3)
    top1 = 100 * float((table["class"].to_numpy() == split.true).mean())
    assert top1 == pytest.approx(trainer.history[-1]["test/top1"], abs=0.5)  # features have 16 bits


def test_a_model_on_features_is_evaluated_on_shards_without_any(shards: str, stored: str, tmp_path: Path) -> None:
    from pipeline.evaluate import evaluate_split

    trainer = trained(config_of(shards, tmp_path / "run"))
    copy = str(shutil.copytree(shards, tmp_path / "copy", ignore=shutil.ignore_patterns("features-*")))
    opened = open_run(str(tmp_path / "run"))
    own = evaluate_split(opened, opened.split("test"), World()).metrics
    opened.features = ""
    other = evaluate_split(opened, opened.split("test", copy), World()).metrics
    assert own["test/top1"] == pytest.approx(trainer.history[-1]["test/top1"])
    assert other["test/top1"] == pytest.approx(own["test/top1"], abs=2.0)


def test_the_audit_of_latent_shows_what_was_said_without_the_label(shards: str, stored: str, tmp_path: Path) -> None:
    from pipeline.reports.audit.findings import audit_labels

    trainer = trained(config_of(shards, tmp_path / "run", "latent"))
    opened = open_run(str(tmp_path / "run"), own_labels=True)
    findings = audit_labels(opened, opened.split("train"))
    np.testing.assert_allclose(findings.score, trainer.method.get_buffer("score").numpy(), rtol=1e-6)
    assert (findings.suspicious == (findings.score < 0.5)).all()
