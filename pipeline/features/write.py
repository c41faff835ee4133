"""Compute the features of every sample and store them: `ensure_features`, called by all ranks together.

Files of consecutive samples are shared out among ranks. Each is computed in batches that start with it, so its numbers do not
depend on the ranks. A finished file survives a kill; the next start writes the rest. The manifest comes last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from pipeline.config import Config
from pipeline.data.loader import Loader
from pipeline.distributed.world import World
from pipeline.features.encoder import Encoder, pretrained_encoder
from pipeline.models.pretrained import fetch_weights, weights_digest
from pipeline.process.log import log
from shards import features as stored
from shards.base.errors import UserError
from shards.base.progress import Progress
from shards.base.storage import store_at
from shards.features import FeaturesManifest, FeatureSplitInfo, read_features
from shards.manifest import FileInfo, ShardInfo
from shards.reader import Split, open_split, read_manifest

MADE_BY = "evenhand 0.1.0"
BATCH = 16  # samples at a time, each with all its views
# Settings that decide the views of a picture.
VIEW_SETTINGS = (
    "size", "crop", "padding", "area", "flip", "resize", "mean", "std", "augmix", "augmix_severity", "strong_mean", "strong_std",
)  # fmt: skip
ADDED = {
    "interpolation": "bilinear"
}  # settings that came later; a recipe names them where they are not as they were before


@dataclass(frozen=True)
class Block:
    """Consecutive samples of a split, one file."""

    split: str
    number: int
    rows: slice

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:06d}.npy"

    @property
    def record(self) -> str:
        return f".build/{self.name}.json"


def ensure_features(config: Config, shards: str, world: World) -> str:
    """The URL of the features of these shards. They are computed unless they are there."""
    if config.data.features and (about := world.on_main(lambda: read_features(config.data.features))):
        world.on_main(lambda: check_fit(about, config, shards))
        return config.data.features
    fetch_weights(config.model, world)
    encoder = pretrained_encoder(config, world.device)
    url = world.on_main(lambda: _place(config, shards, encoder))
    if not world.on_main(lambda: read_features(url) is not None):
        _Writer(config, shards, url, encoder, world).run()
    return url


def recipe(config: Config, weights: str) -> dict[str, Any]:
    """Everything but the shards that decides the numbers. The training seed is not in it."""
    data = config.data.model_dump(mode="json")
    return {
        "backbone": config.model.backbone,
        "weights": weights,
        "precision": config.train.precision,
        "views": config.data.feature_views,
        **{key: data[key] for key in VIEW_SETTINGS},
        **{key: data[key] for key, before in ADDED.items() if data[key] != before},
    }


def _place(config: Config, shards: str, encoder: Encoder) -> str:
    if config.data.features:
        return config.data.features
    made = recipe(config, weights_digest(encoder.backbone))
    digest = stored.recipe_digest(read_manifest(shards).hash, made)
    if shards.startswith("http"):
        raise UserError(f"Features cannot be stored beside {shards}. Set data.features to a folder or an object store.")
    name = config.model.backbone.replace("/", "-").replace(".", "-")
    return store_at(shards).at(f"features-{name}-{digest[:8]}")


def check_fit(about: FeaturesManifest, config: Config, shards: str) -> None:
    """Refuse features of other shards, another backbone or other views, saying how they differ."""
    where = config.data.features
    if about.shards != read_manifest(shards).hash:
        raise UserError(
            f"The features at {where} were made of other shards than {shards}. Leave data.features out, and they are "
            "computed; or give the folder of the right ones."
        )
    made, wanted = ADDED | about.recipe, ADDED | recipe(config, about.recipe.get("weights", ""))
    differing = [key for key in wanted if made.get(key) != wanted[key]]
    if differing:
        key = {"backbone": "model.backbone", "precision": "train.precision", "views": "data.feature_views"}
        listed = ", ".join(
            f"{key.get(name, f'data.{name}')}={made.get(name)!r} (now {wanted[name]!r})" for name in differing[:4]
        )
        raise UserError(
            f"The features at {where} were made with other settings: {listed}. Set them so, or leave data.features out, "
            "and they are computed."
        )


def encoding_loader(split: Split, config: Config, encoder: Encoder, world: World) -> Loader:
    """Features of pictures, computed as they are read. Views do not depend on the training seed."""
    loader = Loader(split, config.data, 0, world, 1, channels_last=True)
    loader.encode = encoder
    return loader


class _Writer:
    def __init__(self, config: Config, shards: str, url: str, encoder: Encoder, world: World) -> None:
        self.config, self.encoder, self.world = config, encoder, world
        self.store, self.about = store_at(url), read_manifest(shards)
        self.recipe = recipe(config, weights_digest(encoder.backbone))
        self.splits: dict[str, Split] = {
            name: open_split(shards, name, config.data.cache) for name in self.about.splits
        }
        self.loaders = {name: encoding_loader(split, config, encoder, world) for name, split in self.splits.items()}

    def views(self, split: str) -> tuple[str, ...]:
        """Of test pictures only the test view is ever used."""
        if split != "train":
            return (stored.TEST,)
        count = range(self.config.data.feature_views)
        return (stored.TEST, *(f"weak{v}" for v in count), *(f"strong{v}" for v in count))

    def blocks(self) -> Iterator[Block]:
        for name, split in self.splits.items():
            rows = stored.block_rows(len(split))
            for number, first in enumerate(range(0, len(split), rows)):
                yield Block(name, number, slice(first, min(first + rows, len(split))))

    def run(self) -> None:
        self.world.on_main(self._begin)
        self.world.each_rank(self._write_own)
        self.world.on_main(self._finish)

    def _begin(self) -> None:
        """Say what it costs, and refuse to begin what cannot be finished or would overwrite something else."""
        sizes = {
            name: len(split) * len(self.views(name)) * 2 * self.encoder.width for name, split in self.splits.items()
        }
        passes = sum(len(split) * len(self.views(name)) for name, split in self.splits.items())
        log.info(
            "computing features of %s once: %d samples, %d passes through %s, %.1f MB at %s",
            self.about.source, sum(map(len, self.splits.values())), passes, self.config.model.backbone,
            sum(sizes.values()) / 1e6, self.store,
        )  # fmt: skip
        if self.store.root is not None:
            existing = next(p for p in (self.store.root, *self.store.root.absolute().parents) if p.exists())
            free = psutil.disk_usage(str(existing)).free
            if sum(sizes.values()) > free:
                raise UserError(
                    f"The features need {sum(sizes.values()) / 1e9:.1f} GB at {self.store}, where {free / 1e9:.1f} GB are "
                    "free. Make room, set data.features to another place, or store fewer views (data.feature_views)."
                )
        record = json.dumps([self.about.hash, self.recipe], sort_keys=True).encode()
        begun = self.store.read("build.json", 1 << 20)
        if begun is None and self.store.sizes():
            raise UserError(f"{self.store} holds other files. Choose an empty or new folder for data.features.")
        if begun is not None and begun != record:
            raise UserError(
                f"{self.store} holds unfinished features made with other settings. Remove it, or choose another data.features."
            )
        if begun is None:
            self._mkdir()
            self.store.write("build.json", record)

    def _mkdir(self) -> None:
        if self.store.root is not None:
            try:
                self.store.root.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"The features cannot be stored at {self.store} ({error.strerror}). Set data.features to another folder."
                ) from None

    def _write_own(self) -> None:
        """This rank's files that are not there yet."""
        mine = [b for n, b in enumerate(self.blocks()) if n % self.world.size == self.world.rank]
        todo = [block for block in mine if self._written(block) is None]
        total = sum(block.rows.stop - block.rows.start for block in todo)
        with Progress(total, "pictures", log.info, self.world.is_main, "features") as progress:
            for block in todo:
                self._write(block, progress)

    def _written(self, block: Block) -> dict[str, Any] | None:
        data = self.store.read(block.record, 1 << 24)
        found: dict[str, Any] | None = json.loads(data) if data else None
        return found if found and self.store.size(block.name) == found["file"]["bytes"] else None

    def _write(self, block: Block, progress: Progress) -> None:
        views, rows = self.views(block.split), block.rows
        loader = self.loaders[block.split]
        numbers = np.empty((len(views), rows.stop - rows.start, self.encoder.width), stored.DTYPE)
        for batch in loader.consecutive(rows, views, BATCH):
            at = batch.index.cpu().numpy() - rows.start
            for number, view in enumerate(views):
                numbers[number, at] = batch.views[view].cpu().numpy()
            progress.step(len(at))
        if not np.isfinite(numbers).all():
            raise UserError(
                f"{self.config.model.backbone} gives features beyond what 16 bits hold, or none at all. Check "
                "model.pretrained, data.mean and data.std."
            )
        bad = {index: why for index, why in loader.bad.items() if rows.start <= index < rows.stop}
        file = self._publish(block.name, stored.npy_header(*numbers.shape) + numbers.tobytes())
        self.store.write(block.record, json.dumps({"file": file.model_dump(), "bad": bad}).encode())

    def _publish(self, name: str, data: bytes) -> FileInfo:
        path = self.store.temporary()
        path.write_bytes(data)
        self.store.publish(path, name)
        return FileInfo(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def _finish(self) -> None:
        splits: dict[str, FeatureSplitInfo] = {}
        for name, split in self.splits.items():
            blocks: list[ShardInfo] = []
            bad: dict[int, str] = {}
            for block in self.blocks():
                if block.split == name:
                    found = self._written(block)
                    assert found is not None, block
                    blocks.append(ShardInfo(**found["file"], samples=block.rows.stop - block.rows.start))
                    bad |= {int(index): why for index, why in found["bad"].items()}
            self._check_bad(name, bad, len(split))
            splits[name] = FeatureSplitInfo(
                samples=len(split), views=list(self.views(name)), blocks=blocks, bad=dict(sorted(bad.items()))
            )
        backbone = self._publish(stored.BACKBONE, self.encoder.to_bytes())
        about = FeaturesManifest(
            made_by=MADE_BY, shards=self.about.hash, recipe=self.recipe, width=self.encoder.width, backbone=backbone,
            splits=splits,
        )  # fmt: skip
        self.store.write(stored.FILE, (about.model_dump_json(indent=1) + "\n").encode())
        self.store.remove_folder(".build")
        log.info("features: %s", self.store)

    def _check_bad(self, split: str, bad: dict[int, str], samples: int) -> None:
        if len(bad) > self.config.data.max_bad * samples:
            some = "; ".join(f"sample {index}: {why}" for index, why in list(bad.items())[:3])
            raise UserError(
                f"{len(bad)} of {samples} pictures of '{split}' did not decode, more than data.max_bad="
                f"{self.config.data.max_bad:g} allows ({some}). Check the shards with python -m shards.verify and build "
                "them again, or raise data.max_bad."
            )
