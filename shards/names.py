"""What a data set is called, and its imbalance in words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shards.base.storage import store_at
from shards.config import BIASED_BY_NATURE
from shards.manifest import BiasInfo, Manifest
from shards.record import read_record

OWN_DATA = ("folder", "list")  # these words say nothing about the pictures


def name_of_path(path: str) -> str:
    """A folder's last name, a list's name without its ending. `flowers/train` is flowers."""
    place = Path(path).expanduser().absolute()
    name = place.stem if place.suffix in (".csv", ".parquet") else place.name
    return place.parent.name if name in ("train", "training") and place.parent.name else name


def name_of_source(source: str, path: str) -> str:
    return (name_of_path(path) if source in OWN_DATA and path else "") or source


def name_of_shards(url: str, about: Manifest) -> str:
    """From the build's own record; shards without one are called as their folder is."""
    if about.source not in OWN_DATA:
        return about.source
    path = built_with(url).get("path") or url.rstrip("/")
    return name_of_source(about.source, str(path))


def built_with(url: str) -> dict[str, Any]:
    """The options of the build, with the places of its inputs; empty where only the shards were copied."""
    record = read_record(store_at(url))
    return dict(record["options"]) if record else {}


def imbalance(largest_to_smallest: float | None) -> str:
    """`imbalance 8.4 : 1`"""
    if largest_to_smallest is None:
        return "a class is empty"
    if largest_to_smallest < 1.05:
        return "balanced"
    digits = 0 if largest_to_smallest >= 100 else 1
    return f"imbalance {round(largest_to_smallest, digits):g} : 1"


def tail_in_words(bias: BiasInfo) -> str:
    """The imbalance that is there, and rho where it was injected."""
    text = imbalance(bias.realised_rho)
    return f"rho {bias.rho:g} ({text})" if bias.rho > 1 else text


def injected(bias: BiasInfo) -> str:
    """` rho=10 noise=0.5`: only what the build has done to the data."""
    rho = f" rho={bias.rho:g}" if bias.rho > 1 else ""
    return rho + (f" noise={bias.noise:g}" if bias.noise > 0 else "")


def size_of_few(about: Manifest) -> dict[str, int]:
    """How little a number for the rare classes may stand on: `few_test_pictures` and the like, `few_training_samples`."""
    few = about.groups["few"]
    out = {
        f"few_{name}_pictures": sum(info.clean_counts[k] for k in few)
        for name, info in about.splits.items()
        if name != "train"
    }
    return {**out, "few_training_samples": sum(about.splits["train"].clean_counts[k] for k in few)} if few else {}


def few_in_words(sizes: Mapping[str, Any], split: str = "test") -> str:
    """` (72 pictures, 31 training samples)`, from anything that has these names; empty if it has not."""
    pictures, samples = sizes.get(f"few_{split}_pictures"), sizes.get("few_training_samples")
    return "" if pictures is None or samples is None else f" ({pictures} pictures, {samples} training samples)"


def known_bias(about: Manifest) -> dict[str, float]:
    """rho and noise. Nobody knows the noise of pictures from outside; there only what was injected counts."""
    bias = about.bias
    both = {"rho": bias.rho, "noise": bias.noise}
    if about.source not in BIASED_BY_NATURE:
        return both
    return {key: value for key, value in both.items() if value > {"rho": 1, "noise": 0}[key]}
