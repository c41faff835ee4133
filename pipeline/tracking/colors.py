"""Colour, dash and marker of each method: the same in every figure, every report and in MLflow.

The colours are Okabe and Ito's, made for colour-blind readers; dashes and markers differ too, for print without
colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C6D00")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
# A method keeps its colour in every picture of every report; new methods are added at the end.
METHODS = (
    "prototypical", "cross_entropy", "dividemix", "rolt", "ldam", "elr", "rrl", "crt", "coteaching",
    "mentornet", "har", "ncm", "ldam_drw", "aum", "elr_plus", "sfa", "mopro",
    "latent", "finetune", "ssr", "dasc", "pls_lsa", "evenhand",
)  # fmt: skip


def free_color(wanted: str, taken: Sequence[str]) -> str:
    """The wanted colour, or the next of the palette that is taken least."""
    if wanted not in taken:
        return wanted
    return min(
        (color for color in PALETTE if color != wanted), key=lambda color: (taken.count(color), PALETTE.index(color))
    )


def style(method: str) -> dict[str, Any]:
    """Colour, dash and marker of a method."""
    known = METHODS.index(method) if method in METHODS else len(METHODS) + sum(method.encode()) % 7
    turn = known // len(PALETTE)
    return {
        "color": PALETTE[known % len(PALETTE)],
        "linestyle": DASHES[turn % len(DASHES)],
        "marker": MARKERS[(known + turn) % len(MARKERS)],
    }
