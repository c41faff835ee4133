"""The page of an audit: every suspicious sample as a card, shares by class, and what people decide about them.

One file that works offline. Its data are JSON columns; the script draws only the cards of the current page.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.reports.audit.decisions import ACTIONS, Decisions
from pipeline.reports.audit.findings import Findings, detection_quality, rates, summary_line, wrong_share
from pipeline.reports.audit.issues import Issue, label_issues
from pipeline.reports.audit.shares import MIN_JUDGED, Share
from pipeline.reports.audit.thumbnails import INLINE, Pictures, make_pictures
from pipeline.reports.pages import render
from shards.base.files import atomic_write

if TYPE_CHECKING:
    from shards.reader import Split


@dataclass(frozen=True)
class ClassRate:
    """A line of the table by class."""

    number: int
    name: str
    rate: Share
    wrong: float | None  # share of labels that are really wrong; None: not known
    taken_for: list[tuple[str, int]]  # what its suspicious samples are taken for, most often first

    @property
    def low(self) -> float:
        return self.rate.interval[0]

    @property
    def high(self) -> float:
        return self.rate.interval[1]


def write_page(
    findings: Findings,
    split: Split,
    name: str,
    path: Path,
    per_class: int,
    *,
    issues: Sequence[Issue] | None = None,
    decisions: Decisions | None = None,
    inline: int = INLINE,
) -> None:
    """`per_class`: so many of each class come first in the page's first order; all others follow.
    `inline`: above so many bytes of pictures they are files beside the page."""
    classes = list(split.classes)
    class_rates = rates(findings, len(classes))
    order = sorted((k for k in range(len(classes)) if class_rates[k].total), key=lambda k: _rank(class_rates[k]))
    issues = label_issues(findings) if issues is None else issues
    every = np.unique(np.concatenate([np.zeros(0, np.int64), *(issue.samples for issue in issues)]))
    cards = _overview(findings, every, order, per_class)
    near = [neighbour for index in cards for neighbour in findings.neighbours[index]]
    shown = np.concatenate([cards, np.asarray(near, np.int64)])
    pictures = make_pictures(split, shown, path.parent, inline)
    data = _columns(findings, split, cards) | {
        "store": _digest(split, findings),
        "classes": classes,
        "issues": [_issue(issue, cards) for issue in issues],
        "decisions": _preloaded(decisions, split, findings),
        **_where(pictures),
    }
    page = render(
        "audit.html",
        title="Label audit",
        summary=_summary(findings, name, len(classes)),
        note=_note(findings),
        truth_known=bool((findings.true >= 0).any()),
        rates=[_class_rate(k, class_rates[k], findings, classes) for k in order],
        data=_script_json(data),
    )
    atomic_write(path, page)


# -- the data of the cards -------------------------------------------------------------------------


def _overview(findings: Findings, samples: np.ndarray, order: list[int], per_class: int) -> np.ndarray:
    """The worst `per_class` of each class first, class after class; then all others, the worst first."""
    worst = samples[np.lexsort((-findings.suggested_score[samples], findings.score[samples]))]
    place = np.zeros(len(findings.given), np.int64)
    count: dict[int, int] = {}
    for index in worst:
        label = int(findings.given[index])
        place[index] = count[label] = count.get(label, 0) + 1
    rank = {k: n for n, k in enumerate(order)}
    first = worst[place[worst] <= per_class]
    first = first[np.argsort([rank[int(k)] for k in findings.given[first]], kind="stable")] if len(first) else first
    return np.concatenate([first, worst[place[worst] > per_class]])


def _columns(findings: Findings, split: Split, cards: np.ndarray) -> dict[str, Any]:
    columns = {
        "index": cards.tolist(),
        "key": split.keys(cards),
        "given": findings.given[cards].tolist(),
        "suggested": findings.suggested[cards].tolist(),
        "score": _short(findings.score[cards]),
        "suggested_score": _short(findings.suggested_score[cards]),
        "flagged": findings.epochs_flagged[cards].tolist(),
        "near": [findings.neighbours[index] for index in cards],
        "near_label": [[int(findings.given[k]) for k in findings.neighbours[index]] for index in cards],
        "true": findings.true[cards].tolist() if (findings.true >= 0).any() else None,
    }
    return columns


def _short(values: np.ndarray) -> list[float | None]:
    """Four digits; what is not a number becomes null, for JSON has no word for it."""
    return [round(float(value), 4) if np.isfinite(value) else None for value in values]


def _issue(issue: Issue, cards: np.ndarray) -> dict[str, Any]:
    """A tab. What has notes is in its own order; labels are in the order of the cards, the worst of each class first."""
    place = {int(index): k for k, index in enumerate(cards)}
    positions = [place[int(index)] for index in issue.samples]
    order = range(len(positions)) if issue.notes else np.argsort(positions).tolist()
    return {
        "id": issue.id,
        "title": issue.title,
        "why": issue.explanation,
        "cards": [positions[k] for k in order],
        "notes": issue.notes,
        "partners": [[place[one], kept] for one, kept in issue.partners.items()],
    }


def _where(pictures: Pictures) -> dict[str, Any]:
    return {
        "pictures": {str(index): text for index, text in pictures.inline.items()},
        "folder": pictures.folder,
        "unreadable": pictures.unreadable,
    }


def _preloaded(decisions: Decisions | None, split: Split, findings: Findings) -> list[list[Any]]:
    """[index, key, given, decision, label] of every decided sample, on the page or not: an export has them all."""
    if decisions is None:
        return []
    decided = np.flatnonzero(decisions.action)
    return [
        [int(index), key, int(findings.given[index]), ACTIONS[decisions.action[index]], int(decisions.label[index])]
        for index, key in zip(decided, split.keys(decided))
    ]


def _digest(split: Split, findings: Findings) -> str:
    """Says which labels were decided about: the browser keeps decisions under it."""
    given = np.ascontiguousarray(findings.given, np.int64).tobytes()
    return hashlib.sha256(split.manifest.hash.encode() + given).hexdigest()[:24]


def _script_json(data: object) -> str:
    """JSON that may stand inside a script element, whatever the names in it hold."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


# -- the head of the page --------------------------------------------------------------------------


def _summary(findings: Findings, name: str, classes: int) -> str:
    text = f"{summary_line(findings, wrong_share(findings, classes))} Judged: {name}. Suspicious: {findings.rule}."
    quality = detection_quality(findings)
    if quality:
        text += (
            f" Against the true labels: precision {quality['precision']:.3f}, recall {quality['recall']:.3f}, "
            f"F1 {quality['f1']:.3f}; {quality['noise']:.1%} of the labels are wrong."
        )
    return text


def _note(findings: Findings) -> str:
    if findings.judgement is None:
        return "No share is estimated: the model that judges these labels has learned them."
    return (
        "The estimated share of wrong labels, with a 95 % interval from simulations. "
        f"Classes of fewer than {MIN_JUDGED} labels are not judged: too little is known about them."
    )


def _rank(rate: Share) -> tuple[bool, float]:
    """The largest share first, classes that were not judged last."""
    return (False, -rate.share) if rate.judged else (True, 0.0)


def _class_rate(k: int, rate: Share, findings: Findings, classes: list[str]) -> ClassRate:
    own = findings.given == k
    known = own & (findings.true >= 0)
    wrong = float((findings.true[known] != k).mean()) if known.any() else None
    elsewhere = findings.suggested[own & findings.suspicious & (findings.suggested != k)]
    counts = np.bincount(elsewhere, minlength=len(classes))
    taken_for = [(classes[j], int(counts[j])) for j in np.argsort(-counts, kind="stable")[:3] if counts[j]]
    return ClassRate(k, classes[k], rate, wrong, taken_for)
