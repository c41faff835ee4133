"""Builds the parts of a run on this rank: shards, method, engine, loaders, checkpoints, tracker, trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoints import run_lock
from pipeline.checkpoints.checkpointer import Checkpointer, Loaded
from pipeline.checkpoints.position import Position
from pipeline.config import SIMCLR, Config
from pipeline.data.batch import Batch, TrainingSet
from pipeline.data.feature_loader import FeatureLoader
from pipeline.data.loader import open_loader
from pipeline.data.partition import check_ranks
from pipeline.distributed.world import World
from pipeline.engines import make_engine
from pipeline.features.write import ensure_features
from pipeline.methods.base import Method
from pipeline.methods.simclr import method_class
from pipeline.models.pretrained import fetch_weights, with_weights_defaults
from pipeline.models.timm_models import check_picture_size
from pipeline.process.stop_request import STARTED, StopRequest
from pipeline.tracking.final_metrics import with_front
from pipeline.tracking.tracker import NullTracker, start_tracker
from pipeline.training import run_folder
from pipeline.training.memory_check import check_memory
from pipeline.training.start import start_from
from pipeline.training.trainer import OnBatch, Trainer, TrainingData
from shards.base.errors import UserError
from shards.base.settings import Effect, effect_of, flatten
from shards.build import ensure
from shards.features import FeatureSplit, read_features
from shards.names import built_with, injected, known_bias, name_of_shards, size_of_few
from shards.reader import Split, open_split


def build(config: Config, world: World) -> Trainer:
    """A trainer at the position of its newest checkpoint. Called by all ranks together."""
    config = with_weights_defaults(config)
    check_picture_size(config.model.backbone, config.data.size)
    folder = Path(config.output)
    url = world.on_main(lambda: _build_shards(config))
    features = ensure_features(config, url, world) if config.model.from_features else ""
    data = world.each_rank(lambda: _open_data(config, url, features, world))  # the first machine may download for long
    stop_file = config.train.stop_file or str(folder / "stop")
    stop_request = StopRequest(config.train.deadline_minutes, stop_file, started=STARTED)
    stop_request.at_once = world.size == 1  # until the trainer has something to save
    run_lock.lock(folder, world)
    checkpoints = Checkpointer(
        config.checkpoint.url or str(folder / "checkpoints"),
        config.checkpoint.keep,
        world,
        config.checkpoint.background,
    )
    checkpoints.check_writable()
    if not config.model.from_features:
        fetch_weights(config.model, world)
    check_memory(config, len(data.train), len(data.train.classes), world)
    method = _build_method(config, data.train, world)
    own_rows = world.rank_slice(len(method.data))
    resume = checkpoints.load(rows={f"method/{name}": own_rows for name in method.tables})
    if resume is not None:
        check_resumable(config, data, resume.tree, resume.name)
    elif config.model.start not in ("", SIMCLR):
        world.each_rank(lambda: start_from(method, config, data.train.manifest.hash))
    tracker = _build_tracker(config, world, folder, data.train, resume)
    try:
        engine, on_batch = make_engine(config, method, world), _sample_log(config, folder, world)
        trainer = Trainer(config, world, method, engine, data, checkpoints, tracker, stop_request, on_batch, resume)
    except BaseException:
        tracker.finish("FAILED")
        raise
    if tracker.lost:  # the journal is gone: log the saved metrics again
        for epoch, metrics in enumerate(trainer.history, 1):
            tracker.log(epoch, with_front(metrics))
    return trainer


def _build_shards(config: Config) -> str:
    """Create the folder of the run and build the shards; returns their URL. Rank 0 does it, perhaps for hours."""
    run_folder.create_run_folder(config)
    return ensure(config.shards)


def _open_data(config: Config, url: str, features: str, world: World) -> TrainingData:
    check_ranks(config.data.batch, config.optim.accumulate, config.data.mix_group, world.size)
    train = open_split(url, "train", config.data.cache)
    tests = {name: open_split(url, name, config.data.cache) for name in train.manifest.splits if name != "train"}
    data, seed, channels_last = config.data, config.seed, config.model.channels_last
    if features:
        return _open_features(config, features, train, tests, world)
    loader = open_loader(train, data, seed, world, config.optim.accumulate, channels_last)
    test_loaders = {name: open_loader(split, data, seed, world, 1, channels_last) for name, split in tests.items()}
    return TrainingData(train, tests, loader, test_loaders)


def _open_features(config: Config, url: str, train: Split, tests: dict[str, Split], world: World) -> TrainingData:
    about, data, seed = read_features(url), config.data, config.seed
    assert about is not None
    splits = {split.name: FeatureSplit(url, split.name, about, data.cache) for split in (train, *tests.values())}
    loader = FeatureLoader(train.given, splits["train"], data, seed, world, config.optim.accumulate)
    others = {name: FeatureLoader(split.given, splits[name], data, seed, world) for name, split in tests.items()}
    return TrainingData(train, tests, loader, dict(others), {"url": url, "digest": about.digest})


def _build_method(config: Config, train: Split, world: World) -> Method:
    data = TrainingSet(
        train.given,
        len(train.classes),
        config.seed,
        config.data.batch,
        tuple(train.shard_sizes),
        config.data.shuffle_window,
    )
    torch.manual_seed(config.seed)
    return method_class(config)(config, data, world).to(world.device)


def _build_tracker(config: Config, world: World, folder: Path, train: Split, resume: Loaded | None) -> NullTracker:
    if not world.is_main or run_folder.read_summary(folder):
        return NullTracker()
    manifest, bias = train.manifest, train.manifest.bias
    known = known_bias(manifest)
    dataset = name_of_shards(train.url, manifest)
    tags = {
        "method": config.method.name,
        "dataset": dataset,
        "source": manifest.source,
        "manifest": manifest.hash,
        "table_cell": config.table_cell,
        "ranks": str(world.size),
        "recipe": config.recipe,
        "imbalance": f"{bias.realised_rho or 0:g}",
        **{key: f"{value:g}" for key, value in known.items()},
        **{key: str(value) for key, value in size_of_few(manifest).items()},
    }
    params = _params(config, train)
    name = run_folder.run_name(config, dataset, injected(bias))
    tracker = start_tracker(config.tracking, folder, name, params, tags, resume.tree["tracking"] if resume else None)
    tracker.dataset(
        {
            "name": dataset,
            "digest": manifest.hash[:32],
            "source": train.url,
            "samples": len(train),
            "classes": len(train.classes),
            "imbalance": bias.realised_rho,
            **known,
        }
    )
    return tracker


def _params(config: Config, train: Split) -> dict[str, object]:
    """All settings. Of finished shards those they were built with: the run's own say nothing about them."""
    params = flatten(config.model_dump(mode="json"))
    if config.shards.url:
        content = {"shards": config.shards.content()}
        params = {key: value for key, value in params.items() if key not in flatten(content)}
        params |= flatten({"shards": {**train.manifest.options, **built_with(train.url)}})
    return params


def check_resumable(config: Config, data: TrainingData, tree: dict[str, Any], name: str) -> None:
    """Refuse a checkpoint of another training, saying how it differs."""
    advice = "Give another `output` to start anew, or restore the settings to go on."
    if tree["data"]["manifest"] != data.train.manifest.hash:
        raise UserError(f"Checkpoint {name} belongs to other shards (its manifest has another hash). {advice}")
    if data.features and data.features["digest"] != tree["data"].get("features", data.features)["digest"]:
        raise UserError(f"Checkpoint {name} was trained on other features of these shards. {advice}")
    if tree["config"]["method"]["name"] != config.method.name:
        raise UserError(f"Checkpoint {name} is one of method.name={tree['config']['method']['name']}. {advice}")
    then, now = flatten(tree["config"]), flatten(config.model_dump(mode="json"))
    fixed = [key for key in sorted(then.keys() | now.keys()) if effect_of(Config, key) is Effect.RESULT]
    pairs = [(key, then.get(key), now.get(key)) for key in fixed]
    # In Python True equals 1, but model.freeze=1 is one epoch.
    changed = [
        f"{key} was {a!r}, is {b!r}" for key, a, b in pairs if a != b or isinstance(a, bool) != isinstance(b, bool)
    ]
    if changed:
        raise UserError(f"Checkpoint {name} was made with other settings: {'; '.join(changed[:8])}. {advice}")


def _sample_log(config: Config, folder: Path, world: World) -> OnBatch | None:
    """Writes the sample indices of every step to a file."""
    if not config.train.sample_log:
        return None
    folder.mkdir(parents=True, exist_ok=True)  # on another machine than rank 0's it may be missing
    file = open(folder / f"samples-rank{world.rank}.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run

    def write(position: Position, batch: Batch) -> None:
        indices = batch.index[batch.valid > 0].tolist()
        file.write(json.dumps([position.stage, position.epoch, position.pass_index, position.step, indices]) + "\n")
        file.flush()

    return write
