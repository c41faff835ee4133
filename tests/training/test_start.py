"""model.start: a run begins with the backbone, the head and the beliefs of another, or learns without labels first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.config import Config
from pipeline.distributed.world import World
from pipeline.inference.open_run import open_run
from pipeline.models.backbones import build_backbone
from pipeline.models.pretrained import weights_digest, with_weights_defaults
from pipeline.tracking.journal import read
from pipeline.training.build import build
from pipeline.training.trainer import Trainer
from shards.base.errors import UserError
from shards.base.settings import merge
from shards.build import ensure
from shards.config import BuildConfig


def config_of(shards: str, output: Path, method: str, **sections: Any) -> Config:
    tree = {
        "output": str(output), "shards": {"url": shards}, "tracking": {"uri": "", "system_metrics": False},
        "checkpoint": {"background": False}, "train": {"epochs": 1}, "data": {"batch": 32, "size": 8, "padding": 1, "threads": 1},
        "model": {"width": 4, "feature_norm": "root"}, "method": {"name": method},
    }  # fmt: skip
    return Config.model_validate(merge(tree, sections))


def trained(config: Config) -> Trainer:
    trainer = build(config, World())
    trainer.run()
    trainer.checkpoints.close()
    return trainer


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("start") / "digits"
    return ensure(BuildConfig(output=str(folder), rho=5, largest=20, noise=0.2), log=lambda text: None)


@pytest.fixture(scope="module")
def frozen(shards: str, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """latent on stored features."""
    features = {"loader": "features", "feature_views": 0}
    return trained(config_of(shards, tmp_path_factory.mktemp("frozen"), "latent", data=features))


def scores(trainer: Trainer) -> np.ndarray:
    found = []
    trainer.method.eval()
    for _, images in trainer.test_loaders["test"].survey():
        with torch.no_grad():
            found.append(next(iter(trainer.method.scores(images).values())).softmax(1).numpy())
    return np.concatenate(found)


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_fine_tuning_starts_with_the_answers_and_the_labels_of_the_frozen_run(
    shards: str, frozen: Trainer, tmp_path: Path, ema: float
) -> None:
    config = config_of(shards, tmp_path, "finetune", model={"start": frozen.config.output, "ema": ema})
    trainer = build(config, World())
    np.testing.assert_allclose(scores(trainer), scores(frozen), atol=5e-3)  # stored features have 16 bits
    for name in ("weight", "refined"):
        assert torch.equal(trainer.method.get_buffer(name), frozen.method.get_buffer(name))
    assert (trainer.method.get_buffer("weight") < 0.5).any()  # some labels count for little
    before = trainer.method.state_dict()["network.backbone.stem.0.weight"].clone()
    trainer.run()
    assert not torch.equal(trainer.method.state_dict()["network.backbone.stem.0.weight"], before)


def test_a_resumed_run_does_not_start_again(shards: str, frozen: Trainer, tmp_path: Path) -> None:
    config = config_of(shards, tmp_path, "finetune", model={"start": frozen.config.output})
    weights = trained(config).method.state_dict()
    gone = config.model_copy(update={"model": config.model.model_copy(update={"start": "/nowhere"})})
    again = build(gone, World()).method.state_dict()
    assert all(torch.equal(again[name], value) for name, value in weights.items())


def test_on_other_shards_the_weights_are_taken_and_the_beliefs_are_not(
    shards: str, frozen: Trainer, tmp_path: Path
) -> None:
    other = ensure(
        BuildConfig(output=str(tmp_path / "other"), rho=5, largest=20, noise=0.2, bias_seed=1), log=lambda text: None
    )
    config = config_of(other, tmp_path / "run", "finetune", model={"start": frozen.config.output})
    method = build(config, World()).method
    assert torch.equal(method.get_parameter("network.head.weight"), frozen.method.get_parameter("network.head.weight"))
    assert (method.get_buffer("weight") == 1).all()


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"model": {"width": 8}}, r"has model.width=4, here it is 8. Set model.width=4"),
        ({"model": {"feature_norm": "none"}}, r"model.feature_norm=root"),
        ({}, "cannot be the start of coteaching"),
        ({"model": {"start": "nowhere"}}, "There is no checkpoint in nowhere"),
    ],
)
def test_what_does_not_fit_is_refused(
    shards: str, frozen: Trainer, tmp_path: Path, sections: dict[str, Any], match: str
) -> None:
    tree = merge({"model": {"start": frozen.config.output}}, sections)
    config = config_of(shards, tmp_path, "finetune" if sections else "coteaching", **tree)
    with pytest.raises(UserError, match=match):
        build(config, World())


def test_classes_with_few_trusted_samples_weigh_more(shards: str, tmp_path: Path) -> None:
    method: Any = build(config_of(shards, tmp_path, "finetune"), World()).method
    counts = torch.bincount(method.refined.long(), minlength=10).double()
    expected = (counts.mean() / counts) ** 0.5
    torch.testing.assert_close(method.class_factors().double(), expected, rtol=1e-5, atol=1e-5)
    method.weight[method.refined == 0] = 0
    assert method.class_factors()[0] == 20


def test_statistics_may_rest_while_weights_learn(shards: str, frozen: Trainer, tmp_path: Path) -> None:
    model = {"start": frozen.config.output, "freeze_statistics": True}
    trainer = build(config_of(shards, tmp_path, "finetune", model=model), World())
    before = {name: value.clone() for name, value in trainer.method.state_dict().items()}
    trainer.run()
    moved = {name for name, value in trainer.method.state_dict().items() if not torch.equal(value, before[name])}
    assert not {name for name in moved if "running" in name or "tracked" in name}
    assert "network.backbone.stem.0.weight" in moved


# -- model.start=simclr -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def self_supervised(shards: str, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    model = {"start": "simclr", "start_part": 2, "feature_norm": "none"}
    return trained(config_of(shards, tmp_path_factory.mktemp("simclr"), "cross_entropy", model=model))


def test_its_file_gives_another_run_the_same_start(shards: str, self_supervised: Trainer, tmp_path: Path) -> None:
    """To the bit: the rest of the run with the start, and both networks of another method."""
    file = Path(self_supervised.config.output) / "simclr" / "backbone.safetensors"
    model = {"pretrained": str(file), "feature_norm": "none"}
    weights = trained(config_of(shards, tmp_path / "one", "cross_entropy", model=model)).method.state_dict()
    expected = self_supervised.method.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    kept = load_file(file)
    two = build(config_of(shards, tmp_path / "two", "coteaching", model=model), World()).method.state_dict()
    for number in range(2):
        assert all(torch.equal(two[f"networks.{number}.backbone.{name}"], value) for name, value in kept.items())
    assert not torch.equal(two["networks.0.head.weight"], two["networks.1.head.weight"])


def test_its_note_says_what_made_it(self_supervised: Trainer) -> None:
    folder = Path(self_supervised.config.output) / "simclr"
    note = json.loads((folder / "backbone.json").read_text())
    assert note["manifest"] == self_supervised.train_split.manifest.hash
    assert note["settings"]["model"]["start_part"] == 2
    assert note["settings"]["seed"] == self_supervised.config.seed
    backbone, _ = build_backbone(self_supervised.config.model)
    backbone.load_state_dict(load_file(folder / "backbone.safetensors"))
    assert note["weights"] == weights_digest(backbone)


def test_its_file_brings_the_size_of_the_pictures_it_has_seen(self_supervised: Trainer) -> None:
    file = Path(self_supervised.config.output) / "simclr" / "backbone.safetensors"
    asked = {"model": {"pretrained": str(file), "backbone": "resnet18"}, "data": {"resize": 9}}
    data = with_weights_defaults(Config.model_validate(asked)).data  # not the 224 pixels of the published weights
    assert (data.size, data.resize, data.mean) == (8, 9, (0.5, 0.5, 0.5))


def test_its_epochs_are_not_counted_and_its_loss_is_logged(self_supervised: Trainer) -> None:
    assert len(self_supervised.history) == self_supervised.config.train.epochs
    records = [record for _, record in read(Path(self_supervised.config.output) / "journal.jsonl")]
    logged = [(record["step"], record["values"]) for record in records if record["kind"] == "metrics"]
    contrastive = [(step, list(values)) for step, values in logged if "loss/contrastive" in values]
    assert contrastive == [(1, ["loss/contrastive"]), (2, ["loss/contrastive"])]


def test_a_checkpoint_inside_it_can_be_opened(shards: str, tmp_path: Path) -> None:
    config = config_of(shards, tmp_path, "coteaching", model={"start": "simclr", "start_part": 2})
    trainer = build(config, World())
    for _ in trainer.steps():
        if trainer.position.epoch == 1:
            break
    trainer._save(wait=True)
    trainer.checkpoints.close()
    opened = open_run(str(tmp_path))
    trained_so_far = trainer.method.state_dict()["networks.0.backbone.stem.0.weight"]
    assert torch.equal(opened.model.method.state_dict()["networks.0.backbone.stem.0.weight"], trained_so_far)
    assert len(list(opened.model.predict([np.zeros((8, 8, 3), np.uint8)]))) == 1


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"data": {"loader": "features"}}, "has a frozen one with nothing to learn; set data.loader=tar"),
        ({"model": {"freeze": True}}, r"for a frozen one give the backbone.safetensors of a run"),
        ({"model": {"start_part": 0}}, "has no length"),
        ({"model": {"start": "runs/another", "start_part": 0.5}}, "set model.start=simclr"),
        ({"data": {"contrast_area": [0.5, 0.2]}}, "data.contrast_area must be"),
    ],
)
def test_a_self_supervised_start_that_cannot_be_is_refused(sections: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Config.model_validate(merge({"model": {"start": "simclr"}}, sections))


def test_a_run_is_not_resumed_without_its_start(self_supervised: Trainer) -> None:
    config = self_supervised.config
    plain = config.model_copy(update={"model": config.model.model_copy(update={"start": "", "start_part": 0.0})})
    with pytest.raises(UserError, match=r"model.start_part was 2.0, is 0.0"):
        build(plain, World())
