"""Which sample gets which index and label: a function of collection, settings and unusable rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shards import bias
from shards.base.errors import UserError
from shards.config import BIASED_BY_NATURE, VALIDATION, BuildConfig
from shards.manifest import BiasInfo
from shards.sources import Collection, SourceTable

MAX_TRANSITION_CLASSES = 256


@dataclass(frozen=True)
class Plan:
    """One split, by permanent index."""

    rows: NDArray[np.int64]  # row in the source
    given: NDArray[np.int32]
    true: NDArray[np.int32]
    flipped: NDArray[np.bool_]
    clean_counts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def digest(self, start: int, stop: int) -> str:
        """Identifies the samples of one shard with their labels."""
        parts = (self.rows, self.given, self.true, self.flipped)
        digest = hashlib.sha256(f"{start}:{stop}".encode())
        for part in parts:
            digest.update(part[start:stop].tobytes())
        return digest.hexdigest()


def make_plan(collection: Collection, config: BuildConfig, unusable: dict[str, set[int]]) -> dict[str, Plan]:
    """Plans of all splits with the `unusable` rows left out."""
    plans = {}
    for name, rows in collection.splits.items():
        first_choice = _choose(name, rows, collection, config, set())
        plan = first_choice if not unusable.get(name) else _choose(name, rows, collection, config, unusable[name])
        plans[name] = _reorder(plan, _order(name, len(rows), first_choice.rows, plan.rows, config))
    return plans


def _choose(name: str, rows: SourceTable, collection: Collection, config: BuildConfig, unusable: set[int]) -> Plan:
    """The chosen rows, ascending, with their labels."""
    classes = len(collection.classes)
    usable = np.ones(len(rows), bool)
    usable[list(unusable)] = False
    chosen = np.flatnonzero(usable)
    known = bool((rows.true >= 0).all())
    before = rows.true if known else rows.given
    if name == VALIDATION:  # equally many of each class, also where some pictures cannot be used
        each = np.full(classes, bias.counts_of(rows.given[chosen], classes).min())
        chosen = bias.keep_rows(rows.given, chosen, each, np.arange(len(rows)))
    if name != "train":
        nothing = np.zeros(len(chosen), bool)
        return Plan(chosen, rows.given[chosen], rows.true[chosen], nothing, bias.counts_of(before[chosen], classes))
    empty = np.flatnonzero(bias.counts_of(rows.given[chosen], classes) == 0)
    if len(empty):
        raise UserError(
            f"Class '{collection.classes[empty[0]]}' has no usable training picture left. Repair its pictures, "
            "or take the class out."
        )
    if config.rho > 1:
        shuffled = bias.generator(config.bias_seed, "tail").permutation(len(rows))
        chosen = bias.keep_rows(rows.given, chosen, _targets(rows.given[chosen], collection, config), shuffled)
    given, true = rows.given[chosen], rows.true[chosen]
    flipped = np.zeros(len(chosen), bool)
    if config.noise > 0 and config.noise_kind != "none":
        # Labels before the injection count as true.
        true = given
        if (rows.true[rows.true >= 0] != rows.given[rows.true >= 0]).any():
            raise UserError("The labels of this collection are noisy already and say so. Set noise=0.")
        noise = bias.generator(config.bias_seed, "noise")
        shuffled, draws = noise.permutation(len(rows)), noise.random(len(rows))
        wrong = _by_class_number(config.noise_map, collection.classes)
        given = bias.add_noise(rows.given, chosen, classes, config.noise, config.noise_kind, shuffled, draws, wrong)
        flipped = given != rows.given[chosen]
    return Plan(chosen, given, true, flipped, bias.counts_of(before[chosen], classes))


def _targets(labels: NDArray[np.int32], collection: Collection, config: BuildConfig) -> NDArray[np.int64]:
    """Samples to keep of each class."""
    available = bias.counts_of(labels, len(collection.classes))
    if config.tail == "sorted":
        return np.maximum(bias.sorted_tail_counts(available, config.rho), np.minimum(available, 1))
    targets = bias.tail_counts(config.largest or int(available.min()), len(available), config.rho)
    short = np.flatnonzero(available < targets)
    if len(short):
        k = short[0]
        raise UserError(
            f"Class '{collection.classes[k]}' has {available[k]} pictures, the long tail asks for {targets[k]}. "
            f"Lower `largest` (now {config.largest}), or set tail=sorted to take what there is."
        )
    if targets.min() == 0:
        k = int(np.flatnonzero(targets == 0)[0])
        raise UserError(
            f"With rho={config.rho:g} class '{collection.classes[k]}' would be left without a picture "
            f"(the largest class has {targets[0]}). Lower rho, or set tail=sorted."
        )
    return targets


def _by_class_number(wrong: dict[str, str], classes: list[str]) -> dict[int, int]:
    """The map of wrong labels by class number."""
    number = {str(k): k for k in range(len(classes))} | {name: k for k, name in enumerate(classes)}
    out = {}
    for source, target in wrong.items():
        for name in (source, target):
            if name not in number:
                raise UserError(f"noise_map: there is no class '{name}'. Classes are {', '.join(classes[:10])}.")
        if number[source] == number[target]:
            raise UserError(f"noise_map: '{source}' is mapped to itself; a wrong label must be another class.")
        out[number[source]] = number[target]
    return out


def _order(
    name: str, total: int, first_choice: NDArray[np.int64], chosen: NDArray[np.int64], config: BuildConfig
) -> NDArray[np.int64]:
    """Chosen rows, shuffled. A new row takes the position of an unusable one, so that other shards do not change."""
    shuffled = bias.generator(config.bias_seed, f"order of {name}").permutation(total)
    wanted = np.zeros(total, bool)
    wanted[first_choice] = True
    order = shuffled[wanted[shuffled]]
    kept = np.zeros(total, bool)
    kept[chosen] = True
    replacements = shuffled[kept[shuffled] & ~wanted[shuffled]]
    holes = np.flatnonzero(~kept[order])
    direct = min(len(holes), len(replacements))
    order[holes[:direct]] = replacements[:direct]
    order = np.concatenate([order, replacements[direct:]])
    # Positions that are still empty are filled from the end, which shortens the last shards only.
    rest = order[len(chosen) :]
    left = holes[direct:]
    order[left[left < len(chosen)]] = rest[kept[rest]]
    return order[: len(chosen)]


def _reorder(plan: Plan, order: NDArray[np.int64]) -> Plan:
    position = np.searchsorted(plan.rows, order)
    return Plan(order, plan.given[position], plan.true[position], plan.flipped[position], plan.clean_counts)


def describe(collection: Collection, plan: Plan, config: BuildConfig) -> BiasInfo:
    """The bias that was asked for and the one that resulted."""
    classes = len(collection.classes)
    rows = collection.splits["train"]
    before = rows.given[plan.rows]
    counts = bias.counts_of(before, classes)
    matrix = None
    if classes <= MAX_TRANSITION_CLASSES:
        start = np.where(plan.true >= 0, plan.true, before).astype(np.int64)
        matrix = np.bincount(start * classes + plan.given, minlength=classes**2).reshape(classes, classes).tolist()
    return BiasInfo(
        rho=config.rho,
        tail=config.tail,
        noise=config.noise,
        noise_kind=config.noise_kind if config.noise > 0 else "none",
        noise_map=config.noise_map,
        seed=config.bias_seed,
        available_counts=bias.counts_of(rows.given, classes).tolist(),
        realised_rho=round(float(counts.max() / counts.min()), 6) if counts.min() else None,
        realised_noise=round(float(plan.flipped.mean()), 6),
        flipped=int(plan.flipped.sum()),
        transition=matrix,
    )


def warnings_of_bias(collection: Collection, plan: Plan, config: BuildConfig) -> list[str]:
    """What is done on purpose to somebody's own training pictures, to be said aloud."""
    if config.source not in BIASED_BY_NATURE:
        return []
    total, flipped = len(collection.splits["train"]), int(plan.flipped.sum())
    out = []
    if config.rho > 1:
        out.append(
            f"WARNING: rho={config.rho:g} leaves out {total - len(plan)} of your {total} training pictures on purpose."
        )
    if flipped:
        out.append(f"WARNING: noise={config.noise:g}: {flipped} of your {len(plan)} labels are made wrong on purpose.")
    return out
