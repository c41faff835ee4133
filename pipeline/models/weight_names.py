"""Which tensor of a file is which weight of a backbone, whatever project wrote the file.

Files wrap the backbone: {"state_dict": {"module.encoder_q.conv1.weight": ...}}. Nested keys are joined by dots, so every
wrapper is a prefix, and the right prefix is the one under which all names of the backbone are found. Heads and second
encoders are left over. Projects that name layers otherwise (torchvision, EfficientNet-PyTorch) create them in the same
order: there the tensors are taken one by one, if kind and shape of each agree.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from shards.base.errors import UserError

# Of two copies of a network one is meant: an average serves evaluation; the others only help to train its twin.
PREFERRED = {"ema", "average", "teacher"}
AVOIDED = {"momentum", "k", "key", "student", "target"}
COUNTER = "num_batches_tracked"  # has no effect on the features; old files lack it


class Match(NamedTuple):
    tensors: dict[str, Tensor]  # by the backbone's names
    prefix: str
    in_order: bool  # by order and shape, because the names differ
    others: list[str]  # prefixes that fit as well
    left_over: list[str]


def join_names(tree: Mapping[object, object], prefix: str = "") -> dict[str, Tensor]:
    """All tensors of nested dictionaries by dotted name, in their order."""
    out: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, Tensor):
            out[f"{prefix}{key}"] = value
        elif isinstance(value, Mapping):
            out |= join_names(value, f"{prefix}{key}.")
    return out


def match(tensors: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> Match:
    """The tensors of a file for every weight of a backbone. UserError if one is missing or has another shape."""
    needed = {name: value for name, value in wanted.items() if not name.endswith(COUNTER)}
    found = _by_name(tensors, needed)
    complete = [
        p for p, names in found.items() if len(names) == len(needed) and not _misshapen(p, names, tensors, needed)
    ]
    if complete:
        best, *others = sorted(complete, key=_preference)
        sources = {name: best + name for name in wanted if best + name in tensors}
    else:
        orders = _by_order(tensors, needed)
        if not orders:
            raise UserError(_misfit(found, tensors, needed))
        best, *others = sorted(orders, key=_preference)
        sources = dict(zip(needed, orders[best]))
    used = set(sources.values())
    left_over = [name for name in tensors if name not in used and not name.endswith(COUNTER)]
    return Match({n: tensors[source] for n, source in sources.items()}, best, not complete, others, left_over)


def _by_name(tensors: Iterable[str], needed: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The backbone's names that the file has, by the prefix they have there."""
    found: dict[str, list[str]] = defaultdict(list)
    for source in tensors:
        parts = source.split(".")
        for depth in range(len(parts)):
            name = ".".join(parts[depth:])
            if name in needed:
                found[source.removesuffix(name)].append(name)
    return found


def _by_order(tensors: Mapping[str, Tensor], needed: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """By prefix: the names below it that agree with the backbone in kind and shape, one by one. A head may follow."""
    below: dict[str, list[str]] = defaultdict(list)
    for source in tensors:
        parts = source.split(".")
        for depth in range(len(parts) if not source.endswith(COUNTER) else 0):
            below[".".join([*parts[:depth], ""])].append(source)
    kinds = [(_kind(name), value.shape) for name, value in needed.items()]
    first = {prefix: sources[: len(kinds)] for prefix, sources in below.items()}
    return {p: names for p, names in first.items() if [(_kind(n), tensors[n].shape) for n in names] == kinds}


def _kind(name: str) -> str:
    """weight, bias, mean, var, ..."""
    return re.split(r"[._]", name)[-1]


def _preference(prefix: str) -> tuple[bool, bool, int, str]:
    """Smallest is best. The longest prefix is the most exact one."""
    words = set(re.split(r"[._]", prefix))
    return bool(words & AVOIDED), not words & PREFERRED, -len(prefix), prefix


def _misshapen(
    prefix: str, names: Iterable[str], tensors: Mapping[str, Tensor], needed: Mapping[str, Tensor]
) -> list[str]:
    return [name for name in names if tensors[prefix + name].shape != needed[name].shape]


def _misfit(found: dict[str, list[str]], tensors: Mapping[str, Tensor], needed: Mapping[str, Tensor]) -> str:
    """How the best prefix fails, with examples."""
    if not found:
        theirs, ours = ", ".join(list(tensors)[:3]) or "no tensors", ", ".join(list(needed)[:3])
        return f"none of its names is one of the backbone: it has {theirs}, the backbone {ours}, and their shapes differ in order"
    best = min(found, key=lambda prefix: (-len(found[prefix]), _preference(prefix)))
    missing = [name for name in needed if name not in set(found[best])]
    other = _misshapen(best, found[best], tensors, needed)
    problems = []
    if missing:
        problems.append(f"{len(missing)} of {len(needed)} tensors are missing, for example {', '.join(missing[:3])}")
    if other:
        name = other[0]
        shapes = f"{name} is {tuple(tensors[best + name].shape)}, not {tuple(needed[name].shape)}"
        problems.append(f"{len(other)} of {len(needed)} tensors have other shapes, for example {shapes}")
    return "; ".join(problems) + (f" (behind '{best}')" if best else "")
