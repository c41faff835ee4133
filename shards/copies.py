"""What a build says about pictures with the same bytes. It has read them anyway; nothing is decoded for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

EXAMPLES = 3


def warnings_of_copies(
    checks: dict[str, NDArray[np.int64]],
    given: dict[str, NDArray[np.int32]],
    name_of: Callable[[str, int], str],
) -> Iterator[str]:
    """Sentences about copies within train and about pictures of other splits that are in train.

    checks: CRC-32 and size of every stored picture. Two of a million differ and agree in both once in a thousand collections.
    """
    train = checks["train"]
    values, first, which = np.unique(train, return_index=True, return_inverse=True)
    extra = np.flatnonzero(first[which] != np.arange(len(train)))
    if len(extra):
        labels = given["train"]
        apart = int((labels[extra] != labels[first[which[extra]]]).sum())
        under = f"; {apart} of them have another label than the first of their kind" if apart else ""
        examples = ", ".join(
            f"{name_of('train', int(k))} = {name_of('train', int(first[which[k]]))}" for k in extra[:EXAMPLES]
        )
        yield (
            f"Warning: {len(extra)} of {len(train)} training pictures are copies of another, byte for byte{under}. "
            f"For example {examples}. python -m shards.inspect looks for resized copies too."
        )
    for split, own in checks.items():
        place = np.searchsorted(values, own).clip(max=len(values) - 1)
        leaked = np.flatnonzero(values[place] == own) if split != "train" else np.zeros(0, np.int64)
        if len(leaked):
            examples = ", ".join(
                f"{name_of(split, int(k))} = {name_of('train', int(first[place[k]]))}" for k in leaked[:EXAMPLES]
            )
            yield (
                f"Warning: {len(leaked)} of {len(own)} pictures of '{split}' are in train too, byte for byte: results on "
                f"them say too much. For example {examples}. Remove them from train, and build again."
            )
