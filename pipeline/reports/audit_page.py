"""The page of an audit: rates by class, the most suspicious pictures, a filter; one file, no network."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.data.decode import DecodeError, decode
from pipeline.reports.audit import Findings, Rate, detection_quality, rates
from pipeline.reports.pages import render

if TYPE_CHECKING:
    from shards.reader import Split

THUMBNAIL = 72
MOST = 2400  # pictures on the page, so that it opens anywhere


@dataclass(frozen=True)
class ClassRate:
    """A line of the table by class."""

    name: str
    rate: Rate
    wrong: float | None  # share of labels that are really wrong; None: not known
    taken_for: list[tuple[str, int]]  # what its suspicious samples are taken for, most often first

    @property
    def low(self) -> float:
        return self.rate.interval[0]

    @property
    def high(self) -> float:
        return self.rate.interval[1]


@dataclass(frozen=True)
class Card:
    """A suspicious sample."""

    index: int
    key: str
    given: str
    suggested: str
    true: str | None
    score: float
    suggested_score: float
    weight: float | None
    epochs_flagged: int
    nearest: str
    image: str  # base64 of a JPEG; empty: the picture cannot be read
    small: bool


@dataclass(frozen=True)
class Group:
    """The most suspicious samples with one given label."""

    name: str
    flagged: int
    cards: list[Card]


def write_page(findings: Findings, split: Split, name: str, path: Path, per_class: int) -> None:
    classes = list(split.classes)
    class_rates = rates(findings, len(classes))
    per_class = max(1, min(per_class, MOST // len(classes)))
    order = sorted((k for k in range(len(classes)) if class_rates[k].total), key=lambda k: -class_rates[k].share)
    groups = []
    for k in order:
        worst = findings.worst_first(k)[:per_class]
        cards = [_card(int(index), key, findings, split) for index, key in zip(worst, split.keys(worst))]
        if cards:
            groups.append(Group(classes[k], class_rates[k].flagged, cards))
    page = render(
        "audit.html",
        title="Label audit",
        summary=_summary(findings, name),
        truth_known=bool((findings.true >= 0).any()),
        rates=[_class_rate(k, class_rates[k], findings, classes) for k in order],
        classes=classes,
        groups=groups,
    )
    path.write_text(page, encoding="utf-8")


def _summary(findings: Findings, name: str) -> str:
    flagged, total = int(findings.suspicious.sum()), len(findings.given)
    text = f"{flagged} of {total} labels look wrong ({flagged / max(total, 1):.1%}) to {name}. "
    text += f"Suspicious: {findings.rule}."
    quality = detection_quality(findings)
    if quality:
        text += (
            f" Against the true labels: precision {quality['precision']:.3f}, recall {quality['recall']:.3f}, "
            f"F1 {quality['f1']:.3f}; {quality['noise']:.1%} of the labels are wrong, "
            f"{quality['noise after correction']:.1%} after correction."
        )
    return text


def _class_rate(k: int, rate: Rate, findings: Findings, classes: list[str]) -> ClassRate:
    own = findings.given == k
    known = own & (findings.true >= 0)
    wrong = float((findings.true[known] != k).mean()) if known.any() else None
    elsewhere = findings.suggested[own & findings.suspicious & (findings.suggested != k)]
    counts = np.bincount(elsewhere, minlength=len(classes))
    taken_for = [(classes[j], int(counts[j])) for j in np.argsort(-counts, kind="stable")[:3] if counts[j]]
    return ClassRate(classes[k], rate, wrong, taken_for)


def _card(index: int, key: str, findings: Findings, split: Split) -> Card:
    classes = split.classes
    image, small = thumbnail(split, index)
    return Card(
        index=index,
        key=key,
        given=classes[findings.given[index]],
        suggested=classes[findings.suggested[index]],
        true=classes[findings.true[index]] if findings.true[index] >= 0 else None,
        score=float(findings.score[index]),
        suggested_score=float(findings.suggested_score[index]),
        weight=None if findings.weight is None else float(findings.weight[index]),
        epochs_flagged=int(findings.epochs_flagged[index]),
        nearest=", ".join(f"{classes[findings.given[k]]} (#{k})" for k in findings.neighbours[index]),
        image=image,
        small=small,
    )


def thumbnail(split: Split, index: int) -> tuple[str, bool]:
    """(base64 of a JPEG, whether the picture is tiny); nothing for a picture that cannot be read."""
    from PIL import Image

    try:
        picture, _ = decode(split.read(index), 2 * THUMBNAIL)
    except DecodeError:
        return "", False
    image = Image.fromarray(np.ascontiguousarray(picture))
    small = max(image.size) < THUMBNAIL
    if not small:
        image.thumbnail((2 * THUMBNAIL, 2 * THUMBNAIL))
    file = io.BytesIO()
    image.save(file, "jpeg", quality=82 if not small else 95)
    return base64.b64encode(file.getvalue()).decode(), small
