"""Each setting carries one mark: changes the result, may change on resume, or only where and how fast."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import Field

from pipeline.config import Config
from pipeline.reports.run_table import Result, compare
from pipeline.training.build import check_resumable
from shards.base.errors import UserError
from shards.base.settings import Effect, NoEffect, Settings, effect_of, effects, flatten, merge, parse_override
from shards.config import BuildConfig

RESULT = """
seed recipe
data.batch data.size data.crop data.padding data.area data.contrast_area data.flip data.resize data.interpolation data.mean data.std data.augmix
data.augmix_severity data.strong_mean data.strong_std data.mix_group data.shuffle_window data.feature_views
model.backbone model.width model.norm model.embedding model.freeze model.ema model.sync_batchnorm
model.feature_norm model.from_features model.freeze_statistics model.start_part model.start_temperature
optim.name optim.lr optim.momentum optim.betas optim.weight_decay optim.decay_norms optim.backbone_scale
optim.layer_decay optim.schedule optim.schedule_by optim.final_lr optim.milestones optim.decay
optim.restart_epochs optim.warmup_epochs optim.clip optim.accumulate
train.epochs train.evaluate_every train.precision train.tf32
"""
INPUT = "model.pretrained model.start data.features deepspeed.config"
NONE = """
output engine table_cell
data.loader data.eval_batch data.threads data.prefetch data.max_bad data.cache.folder data.cache.max_gb data.cache.reserve_gb
data.cache.prefetch data.cache.deadline
model.checkpoint_activations model.channels_last model.compile
method.neighbour_block
train.deterministic train.device train.log_every train.timeout train.max_bad_steps train.deadline_minutes train.stop_file train.sample_log
checkpoint.url checkpoint.every_epochs checkpoint.every_steps checkpoint.every_minutes checkpoint.keep
checkpoint.background
tracking.uri tracking.experiment tracking.run_name tracking.parent tracking.tags tracking.log_model
tracking.register_as tracking.system_metrics
deepspeed.stage
"""
SHARDS_RESULT = """
source parts classes path_column label_column true_column split_column validation_fraction validation validation_seed rho tail
largest noise noise_kind noise_map bias_seed format resize quality shard_mb shard_samples decode_check max_pixels
max_picture_mb
"""
SHARDS_INPUT = "path root imagenet labels validation_path"
SHARDS_NONE = "url output download max_rejected writers"


def marked(schema: type[Settings], effect: Effect, leave_out: str = "") -> set[str]:
    return {k for k, e in effects(schema).items() if e is effect and not (leave_out and k.startswith(leave_out))}


def test_the_mark_of_every_training_setting() -> None:
    assert marked(Config, Effect.NONE, "shards.") == set(NONE.split())
    assert marked(Config, Effect.INPUT) == set(INPUT.split())
    assert marked(Config, Effect.RESULT, "method.") == set(RESULT.split())


def test_the_mark_of_every_setting_of_a_build() -> None:
    assert marked(BuildConfig, Effect.NONE) == set(SHARDS_NONE.split())
    assert marked(BuildConfig, Effect.INPUT) == set(SHARDS_INPUT.split())
    assert marked(BuildConfig, Effect.RESULT) == set(SHARDS_RESULT.split())
    # In a training the manifest's hash says which data it is.
    assert {effect_of(Config, f"shards.{key}") for key in BuildConfig.model_fields} == {Effect.NONE}


def test_a_field_without_a_mark_and_an_unknown_name_change_the_result() -> None:
    class Inner(Settings):
        new: int = 0
        fast: NoEffect[dict[str, int]] = Field({})

    class Outer(Settings):
        inner: Inner = Inner()
        group: NoEffect[Inner] = Inner()

    assert effects(Outer) == {
        "inner.new": Effect.RESULT, "inner.fast": Effect.NONE, "group.new": Effect.NONE, "group.fast": Effect.NONE,
    }  # fmt: skip
    assert effect_of(Outer, "inner.fast.of.a.mapping") is Effect.NONE
    assert effect_of(Outer, "inner.gone") is Effect.RESULT


# -- the content of shards: folder names and manifests of existing shards stay as they are ----------------------------


@pytest.mark.parametrize(
    ("settings", "folder"),
    [
        ({}, "digits-rho10-noise0.5-seed0-d54bce37"),
        (
            {"source": "webvision", "path": "/data/wv", "imagenet": "/data/in", "classes": 50},
            "webvision-rho1-noise0-seed0-53c2f5e1",
        ),
        (
            {"source": "list", "path": "a.csv", "root": "b", "validation_path": "v.csv"},
            "list-rho1-noise0-seed0-052e93b3",
        ),
        ({"labels": "x.csv"}, "digits-rho10-noise0-seed0-12e35234"),
        (
            {"writers": 3, "download": False, "max_rejected": 0.5, "noise_kind": "symmetric"},
            "digits-rho10-noise0.5-seed0-6767c43c",
        ),
    ],
)
def test_default_folders_are_named_as_version_0_1_named_them(settings: dict[str, Any], folder: str) -> None:
    assert BuildConfig(**settings).place() == f"data/{folder}"


def test_a_manifest_names_no_path_of_a_machine() -> None:
    config = BuildConfig(source="webvision", path="/data/wv", imagenet="/data/in")
    result = set(SHARDS_RESULT.split()) - {"validation"}  # younger than the first shards, and left out while it is 0
    assert set(config.content()) == {*result, *SHARDS_INPUT.split()}
    assert set(config.content(inputs=False)) == result
    assert "validation" in BuildConfig(validation=0.2).content()


# -- resume ------------------------------------------------------------------------------------------------------------


def config_of(*changed: str, method: str = "prototypical") -> Config:
    tree: dict[str, Any] = {"method": {"name": method}}
    for text in changed:
        tree = merge(tree, parse_override(text))
    return Config.model_validate(tree)


def resume(*changed: str) -> None:
    data: Any = SimpleNamespace(train=SimpleNamespace(manifest=SimpleNamespace(hash="abc")), features=None)
    saved = {"config": config_of().model_dump(mode="json"), "data": {"manifest": "abc"}}
    check_resumable(config_of(*changed), data, saved, "step-7")


def test_a_resumed_run_may_change_where_and_how_fast_it_runs() -> None:
    resume(
        "output=elsewhere", "engine=deepspeed", "shards.url=s3://bucket/shards", "shards.noise=0.2", "data.threads=8",
        "data.cache.folder=/scratch", "model.channels_last=true", "model.compile=true", "model.pretrained=/mnt/w",
        "train.device=cpu", "tracking.tags={team: a}", "deepspeed.config=ds.json", "method.neighbour_block=16",
    )  # fmt: skip


@pytest.mark.parametrize(
    "change", ["seed=1", "optim.lr=0.1", "train.precision=bf16", "method.mixup=0", "data.batch=32"]
)
def test_a_resumed_run_may_not_change_what_the_result_depends_on(change: str) -> None:
    name = change.partition("=")[0]
    with pytest.raises(UserError, match=f"made with other settings: {name} was"):
        resume(change)


def test_a_backbone_that_rests_for_ever_is_not_one_that_rests_for_an_epoch() -> None:
    data: Any = SimpleNamespace(train=SimpleNamespace(manifest=SimpleNamespace(hash="abc")), features=None)
    saved = {"config": config_of("model.freeze=true").model_dump(mode="json"), "data": {"manifest": "abc"}}
    check_resumable(config_of("model.freeze=true"), data, saved, "step-7")
    with pytest.raises(UserError, match=r"model\.freeze was True, is 1"):
        check_resumable(config_of("model.freeze=1"), data, saved, "step-7")


# -- the report --------------------------------------------------------------------------------------------------------


def finished(ident: str, seed: int, manifest: str = "a", *changed: str) -> Result:
    settings = flatten(config_of(f"seed={seed}", *changed, method="ldam").model_dump(mode="json"))
    params = {key: str(value) for key, value in settings.items()}
    tags = {"dataset": "webvision", "rho": "1", "noise": "0", "manifest": manifest * 8}
    return Result(ident, "", "FINISHED", params, {"final/last": float(seed)}, tags)


WEBVISION = ("shards.source=webvision", "shards.path=/data/wv")


@pytest.mark.parametrize(
    "changed",
    [
        (*WEBVISION, "shards.imagenet=/mnt/elsewhere/val"),
        (*WEBVISION, "shards.imagenet=/data/val", "model.channels_last=true"),
        ("shards.url=s3://bucket/webvision",),
    ],
    ids=["another mount point", "another memory layout", "finished shards"],
)
def test_seeds_of_the_same_data_are_one_row(changed: tuple[str, ...]) -> None:
    first = finished("first", 0, "a", *WEBVISION, "shards.imagenet=/data/val")
    (rows,) = compare([first, finished("second", 1, "a", *changed)]).values()
    assert [(row.label, len(row.runs)) for row in rows] == [("ldam", 2)]


def test_other_data_is_another_row_named_by_how_it_was_built_where_that_is_known() -> None:
    built = [finished(str(bias), 0, str(bias), f"shards.bias_seed={bias}") for bias in (0, 1)]  # one seed: no draws
    (rows,) = compare([*built, finished("read", 2, "c", "shards.url=/shards")]).values()
    assert [row.label for row in rows] == [
        "ldam shards.bias_seed=0", "ldam shards.bias_seed=1", "ldam manifest=cccccccc",
    ]  # fmt: skip


def test_another_file_of_pretrained_weights_is_another_row() -> None:
    (rows,) = compare([finished("a", 0), finished("b", 1, "a", "model.pretrained=other.safetensors")]).values()
    assert [len(row.runs) for row in rows] == [1, 1]


def test_a_run_without_a_manifest_is_told_apart_by_the_settings_of_its_shards() -> None:
    (rows,) = compare([finished("a", 0, ""), finished("b", 0, "", "shards.bias_seed=1")]).values()
    assert [row.label for row in rows] == ["ldam shards.bias_seed=0", "ldam shards.bias_seed=1"]
