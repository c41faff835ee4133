"""What can be asked of a build, and of the cache that remote shards are read through. No heavy import."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from shards.base.errors import UserError
from shards.base.settings import Effect, Input, NoEffect, Settings, Tree, effects, merge

SourceName = Literal["digits", "cifar10", "cifar100", "fashion_mnist", "webvision", "folder", "list"]
NoiseKind = Literal["prior", "effective", "symmetric", "asymmetric", "none"]

# Files of these names are taken for pictures, by builds and by predict.
SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp")
# What version 0.1 called the columns of labels. Lists in this spelling are still read.
OLD_COLUMNS = {"given": "label", "true": "true_label"}
# Collections that are biased already: nothing is injected unless somebody asks for it.
BIASED_BY_NATURE = ("webvision", "folder", "list")
VALIDATION = "validation"  # the split that methods and settings are chosen on
# Settings younger than the first shards. At their default they are left out of what describes and names shards, so that
# shards built before are the same ones.
_YOUNG: dict[str, Any] = {"validation": 0.0}
# Files that some sources would never look at; whoever names one expects it to count.
_ONLY_FOR = {
    "labels": ("digits", "cifar10", "cifar100", "fashion_mnist"),
    "imagenet": ("webvision",),
    "validation_path": ("folder", "list"),
}


def _local(path: str) -> str:
    """Not every shell expands ~ behind `path=`, and some add a slash when they complete a folder."""
    return os.path.expanduser(path.rstrip("/") or path)


def in_old_spelling(options: dict[str, Any]) -> dict[str, Any]:
    """Options with the default columns of version 0.1. Only to compare and to name: shards built then are found again."""
    columns = ("label_column", "true_column")
    return {key: OLD_COLUMNS.get(value, value) if key in columns else value for key, value in options.items()}


def with_young(options: dict[str, Any]) -> dict[str, Any]:
    """Options with the settings that are left out at their default. To compare builds."""
    return _YOUNG | options


LocalPath = Annotated[str, AfterValidator(_local)]


class CacheConfig(Settings):
    """The local copy of remote shards."""

    folder: NoEffect[LocalPath] = Field(
        default="", description="where copies are kept; empty: ~/.cache/evenhand/shards"
    )
    max_gb: NoEffect[float] = Field(
        default=100.0, gt=0, description="bytes the cache may take, in GB; the oldest copies go first"
    )
    reserve_gb: NoEffect[float] = Field(default=1.0, ge=0, description="disk space left free, in GB")
    prefetch: NoEffect[int] = Field(default=2, ge=0, description="shards fetched ahead of use")
    deadline: NoEffect[float] = Field(
        default=300.0, gt=0, description="seconds after which fetching one shard is given up"
    )


class BuildConfig(Settings):
    """Which pictures become which shards."""

    url: NoEffect[str] = Field(default="", description="finished shards to read (folder or URL); nothing is built then")
    source: SourceName = Field(default="digits", description="where pictures and labels come from")
    path: Input[LocalPath] = Field(default="", description="the raw data: a folder, or the label list for source=list")
    root: Input[LocalPath] = Field(
        default="", description="source=list: folder its paths start from; empty: the list's own folder"
    )
    output: NoEffect[str] = Field(
        default="", description="folder or URL for the shards; empty: a name made of the options, below data/"
    )
    download: NoEffect[bool] = Field(
        default=True, description="source=cifar10/100: may fetch what is missing from `path`"
    )

    parts: Literal["google", "flickr", "both"] = Field(
        default="google", description="source=webvision: which training lists"
    )
    classes: int = Field(
        default=0, ge=0, description="source=webvision: the first n classes (50: mini-WebVision); 0: all"
    )
    imagenet: Input[LocalPath] = Field(
        default="", description="source=webvision: ILSVRC-2012 validation folder; becomes split 'imagenet'"
    )
    labels: Input[LocalPath] = Field(
        default="",
        description="source=digits/cifar/fashion_mnist: one noisy label per training picture: CSV, Parquet, or a file of CIFAR-N (.pt)",
    )
    path_column: str = Field(default="path", description="lists: column of paths")
    label_column: str = Field(
        default="given", description="lists: column of given labels (names or numbers); `label` if there is no `given`"
    )
    true_column: str = Field(
        default="true", description="lists: column of true labels, may be absent; `true_label` if there is no `true`"
    )
    split_column: str = Field(
        default="split", description="lists: column saying train or test (or is_valid); may be absent"
    )
    validation_path: Input[LocalPath] = Field(
        default="", description="source=folder/list: second folder or list with the test pictures"
    )
    validation_fraction: float = Field(
        default=0.1, gt=0, lt=1, description="share of each class held out as test pictures if no test set is given"
    )
    validation: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the training pictures for a split 'validation' of its own, equally many of each class, "
        "cut before any bias; 0: none",
    )
    validation_seed: int = Field(default=0, ge=0, description="seed of what is held out, apart from bias_seed")

    rho: float = Field(
        default=10.0,
        ge=1,
        description="long tail: largest class / smallest; 1: none (default 1 for own data)",
    )
    tail: Literal["natural", "sorted"] = Field(
        default="natural",
        description="natural: classes in their order, exact counts; sorted: by size, as many as there are",
    )
    largest: int = Field(default=0, ge=0, description="tail=natural: size of class 0; 0: what every class can meet")
    noise: float = Field(default=0.5, ge=0, lt=1, description="share of labels made wrong (default 0 for own data)")
    noise_kind: NoiseKind = Field(
        default="prior",
        description="where wrong labels go: by class sizes, the same with self-flips, evenly, by noise_map",
    )
    noise_map: dict[str, str] = Field(default_factory=dict, description="noise_kind=asymmetric: {class: wrong class}")
    bias_seed: int = Field(default=0, ge=0, description="seed of tail and noise; the training seed is another thing")

    format: Literal["tar", "beton", "both"] = Field(default="tar", description="webdataset tars, an FFCV file, or both")
    resize: int = Field(
        default=0,
        ge=0,
        description="shrink so that the short side has this many pixels; 0: bytes stay untouched",
    )
    quality: int = Field(default=90, ge=1, le=100, description="JPEG quality of what is encoded anew")
    shard_mb: float = Field(default=256.0, gt=0, description="aimed size of a tar, in MB")
    shard_samples: int = Field(
        default=0,
        ge=0,
        description="samples in a tar; 0: as many as shard_mb holds, at most 10 000, fewer if that gives 32 tars of 512",
    )
    decode_check: bool = Field(default=False, description="decode every picture even if its bytes stay untouched")
    max_pixels: int = Field(default=50_000_000, ge=1, description="larger pictures are rejected")
    max_picture_mb: float = Field(default=64.0, gt=0, le=2000, description="larger files are rejected")
    max_rejected: NoEffect[float] = Field(
        default=0.01, ge=0, le=1, description="share of pictures that may be unusable before giving up"
    )
    writers: NoEffect[int] = Field(
        default=0, ge=0, description="processes that write; 0: one for each core, one alone for a small set"
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_source(cls, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        tree = dict(tree)
        if tree.get("source") in BIASED_BY_NATURE:
            tree.setdefault("rho", 1.0)
            tree.setdefault("noise", 0.0)
        if tree.get("labels") or tree.get("noise_kind") == "none":
            tree.setdefault("noise", 0.0)
        if tree.get("source") == "webvision":
            tree.setdefault("tail", "sorted")
        if isinstance(tree.get("noise_map"), dict):
            tree["noise_map"] = {str(key): str(value) for key, value in tree["noise_map"].items()}
        return tree

    @model_validator(mode="after")
    def _fits_together(self) -> BuildConfig:
        if self.noise_kind == "none" and self.noise > 0:
            raise ValueError(f"noise_kind=none and noise={self.noise:g} contradict each other; leave one of them out.")
        if self.noise_kind == "asymmetric" and self.noise > 0 and not self.noise_map:
            raise ValueError("noise_kind=asymmetric needs noise_map, for example noise_map='{truck: automobile}'.")
        if self.labels and self.noise > 0:
            raise ValueError("labels brings its own noise; set noise=0, or leave labels out.")
        if not self.url and self.source in BIASED_BY_NATURE and not self.path:
            raise ValueError(f"source={self.source} needs path=..., where the pictures are.")
        for name, sources in _ONLY_FOR.items():
            if not self.url and getattr(self, name) and self.source not in sources:
                raise ValueError(
                    f"{name} is for source={' or '.join(sources)}; with source={self.source} leave it out."
                )
        return self

    def content(self, inputs: bool = True) -> dict[str, Any]:
        """The settings that decide what is in the shards; without `inputs`, no path of this machine."""
        known = effects(BuildConfig)
        wanted = (Effect.RESULT, Effect.INPUT) if inputs else (Effect.RESULT,)
        return {
            key: value
            for key, value in self.model_dump(mode="json").items()
            if known[key] in wanted and _YOUNG.get(key) != value
        }

    def place(self) -> str:
        """Where the shards are or will be."""
        if self.url or self.output:
            return self.url or self.output
        digest = hashlib.sha256(json.dumps(in_old_spelling(self.content()), sort_keys=True).encode()).hexdigest()[:8]
        bias = f"rho{self.rho:g}-noise{self.noise:g}-seed{self.bias_seed}"
        return f"data/{self.source}-{bias}-{digest}"


def combine(file_tree: Tree, overrides: Tree) -> Tree:
    """The file, then the command line, as every command has it; checked for bias that nobody asked for."""
    tree = merge(file_tree, overrides)
    refuse_unasked_bias(tree, overrides)
    return tree


def refuse_unasked_bias(tree: Tree, typed: Tree, prefix: str = "") -> None:
    """A config file written for clean data must not remove pictures or falsify labels of somebody's own collection.

    typed: what stands on the command line; a value there is asked for.
    """
    if tree.get("source") not in BIASED_BY_NATURE or tree.get("url"):
        return
    neutral = {"rho": 1, "noise": 0}
    unasked = {key: tree[key] for key in neutral if key in tree and key not in typed}
    unasked = {key: value for key, value in unasked.items() if _number(value) > neutral[key]}
    if unasked:
        found = " and ".join(f"{key}={value}" for key, value in unasked.items())
        harm = {"rho": "remove pictures", "noise": "falsify labels"}
        without = " ".join(f"{prefix}{key}={neutral[key]}" for key in unasked)
        raise UserError(
            f"{found} of the config file would {' and '.join(harm[key] for key in unasked)} of your own collection "
            f"(source={tree['source']}). Leave that out with {without}, or, if you mean it, write "
            f"{' '.join(f'{prefix}{key}={value}' for key, value in unasked.items())} on the command line."
        )


def _number(value: object) -> float:
    """0 for what is no number: the check of types comes later and says it better."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0.0
