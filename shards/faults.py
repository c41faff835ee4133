"""Faults of pictures: each has a score and a rule with constants.

Nothing is a fault that more than half of a set has: then it is the nature of the set (8 x 8 digits are tiny, scans are grey).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shards.measure import Measured

TINY, TINY_SHARE = 64, 0.25  # short side: below so many pixels, and below this part of the set's median
ASPECT, ASPECT_TIMES = 3.0, 2.0  # long side over short: above this, and above so many times the set's median
BLANK = 5.0  # contrast of the thumbnail, of 255
SHARPNESS, SHARPNESS_SHARE = 0.10, 0.25  # below this, and below this part of the set's median
GREY = 2.0  # mean difference between colour channels, of 255
DARK, BRIGHT = 64, 200  # 99 % of the pixels are darker; 99 % are brighter
COMMON = 0.5  # what more of a set has is no fault

# Fault -> what its score is.
FAULTS = {
    "broken": "1: the picture does not decode; 0.5: a part of it is missing",
    "tiny": "short side in pixels",
    "odd_aspect": "long side over short side",
    "blank": "contrast: standard deviation of the thumbnail, of 255",
    "blurred": "sharpness: strongest fine detail over the range of brightness",
    "grey": "mean difference between colour channels, of 255",
    "dark": "brightness that 1 % of the pixels exceed, of 255",
    "bright": "brightness that 1 % of the pixels do not reach, of 255",
}


def find_faults(measured: Measured) -> tuple[dict[str, NDArray[np.float32]], dict[str, NDArray[np.bool_]]]:
    """Scores and flags of every fault, by sample. A picture that does not decode has no other fault."""
    fine = ~measured.broken
    short = np.minimum(measured.width, measured.height).astype(np.float32)
    long = np.maximum(measured.width, measured.height).astype(np.float32)
    aspect = (long / np.maximum(short, 1)).astype(np.float32)
    scores: dict[str, NDArray[np.float32]] = {
        "broken": np.where(measured.broken, 1, np.where(measured.cut_short, 0.5, 0)).astype(np.float32),
        "tiny": short,
        "odd_aspect": aspect,
        "blank": measured.contrast,
        "blurred": measured.sharpness,
        "grey": measured.colour,
        "dark": measured.brightest,
        "bright": measured.darkest,
    }
    for name in set(scores) - {"broken"}:
        scores[name] = np.where(fine, scores[name], np.float32(np.nan))
    blank = scores["blank"] < BLANK
    seen = fine & ~blank  # the rest cannot be asked of one colour
    flags: dict[str, NDArray[np.bool_]] = {
        "broken": scores["broken"] > 0,
        "tiny": (short < TINY) & (short < TINY_SHARE * _median(short[fine])),
        "odd_aspect": (aspect > ASPECT) & (aspect > ASPECT_TIMES * _median(aspect[fine])),
        "blank": blank,
        "blurred": seen
        & (measured.sharpness < SHARPNESS)
        & (measured.sharpness < SHARPNESS_SHARE * _median(measured.sharpness[seen])),
        "grey": seen & (measured.colour < GREY),
        "dark": seen & (measured.brightest < DARK),
        "bright": seen & (measured.darkest > BRIGHT),
    }
    for name, flag in flags.items():
        if name != "broken":
            flag &= fine
            if flag.sum() > COMMON * fine.sum():
                flag[:] = False
    return scores, flags


def _median(values: NDArray[np.float32]) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else 0.0
