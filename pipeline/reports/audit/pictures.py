"""What an audit says about pictures: copies, labels that contradict each other, leaks into train, faults."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipeline.reports.audit.issues import Issue
from shards.faults import FAULTS
from shards.findings import PictureFindings, SplitFindings, find_in_pictures
from shards.reader import Split

_EXPLAINED = {
    "broken": ("Broken pictures", "The picture does not decode, or a part of it is missing."),
    "tiny": ("Tiny pictures", "The short side is below 64 pixels and a quarter of what is usual in this set."),
    "odd_aspect": ("Odd shapes", "One side is more than three times the other, and twice what is usual in this set."),
    "blank": ("Blank pictures", "Nearly one colour: there is nothing to see."),
    "blurred": ("Blurred pictures", "No fine detail anywhere, and far less than is usual in this set."),
    "grey": ("Grey pictures", "No colour, in a set of colour pictures."),
    "dark": ("Dark pictures", "99 % of the pixels are nearly black."),
    "bright": ("Bright pictures", "99 % of the pixels are nearly white."),
}
_LOW_IS_BAD = ("tiny", "blank", "blurred", "grey", "dark")


def audit_pictures(splits: dict[str, Split], progress: Callable[[int], None] = lambda count: None) -> PictureFindings:
    """Read every picture of these splits once. `progress` gets the number of pictures done since the last call."""
    return find_in_pictures(splits, progress)


def columns(findings: PictureFindings, split: str = "train") -> dict[str, np.ndarray]:
    """Columns for the table of an audit, a row for each sample of the split."""
    part = findings.splits[split]
    out: dict[str, np.ndarray] = {
        "width": part.width, "height": part.height, "bytes": part.bytes, "duplicate_group": part.group,
        "duplicate_equal": part.equal, "duplicate_distance": part.distance, "duplicate_keep": part.keeper,
        "duplicate_conflict": part.conflict, "in_train": part.leak,
    }  # fmt: skip
    for fault in FAULTS:
        out[fault], out[f"{fault}_score"] = part.faults[fault], part.scores[fault]
    return out


def picture_issues(findings: PictureFindings, splits: dict[str, Split], split: str = "train") -> list[Issue]:
    """What is wrong with the pictures of a split, without what does not occur."""
    part = findings.splits[split]
    out = []
    together = _groups(findings, split)
    several = [group for group in together if len(group) > 1]
    contrary = [group for group in several if len(np.unique(part.given[group])) > 1]
    for id, title, explanation, groups in (
        ("conflicts", "One picture, two labels", "Copies of the same picture have different labels.", contrary),
        ("duplicates", "Copies", "The same picture more than once; the first of a group is the one to keep.", several),
    ):
        samples = np.array([k for group in groups for k in group], np.int64)
        notes = [note for group in groups for note in _group_notes(part, group)]
        out.append(Issue(id, title, explanation, samples, part.distance[samples], groups, notes))
    out.append(_leaks(findings, splits, split))
    for fault, (title, explanation) in _EXPLAINED.items():
        samples = np.flatnonzero(part.faults[fault])
        scores = part.scores[fault][samples]
        order = np.argsort(scores if fault in _LOW_IS_BAD else -scores, kind="stable")
        notes = [f"{title}: {score:.3g} ({FAULTS[fault]})." for score in scores[order]]
        out.append(Issue(fault, title, explanation, samples[order], scores[order], notes=notes))
    return [issue for issue in out if len(issue.samples)]


def _group_notes(part: SplitFindings, group: list[int]) -> list[str]:
    def size(k: int) -> str:
        return f"{part.width[k]} x {part.height[k]} pixels, {part.bytes[k]:,} bytes"

    first = f"{len(group)} copies; this one would be kept: {size(group[0])}."
    return [
        first,
        *(f"{'The same' if part.distance[k] == 0 else 'Nearly the same'} picture: {size(k)}." for k in group[1:]),
    ]


def _leaks(findings: PictureFindings, splits: dict[str, Split], split: str) -> Issue:
    """In train: pictures of other splits. Elsewhere: pictures that are in train."""
    here = int(split == "train")  # the column of this split in pairs
    where: dict[int, str] = {}
    for other, pairs in findings.leaks.items():
        if here or other == split:
            names = splits["train" if not here else other].keys(pairs[:, 1 - here])
            for sample, name in zip(pairs[:, here].tolist(), names):
                where.setdefault(sample, f"Also in {other if here else 'train'}: {name}.")
    leaked = np.array(sorted(where), np.int64)
    title = "Test pictures in train" if here else "Pictures that are in train"
    text = f"The same picture is in {'a test split' if here else 'train'}, so results {'there' if here else 'here'} say too much."
    return Issue(
        "leaks", title, text, leaked, findings.splits[split].distance[leaked], notes=[where[k] for k in leaked.tolist()]
    )


def drop_duplicates(findings: PictureFindings, right: np.ndarray, bound: float) -> np.ndarray:
    """(N,) which training samples to keep: one of every group of copies. Where copies have different labels, the one whose
    label is right with a probability of at least `bound`; none, if there is none."""
    part = findings.splits["train"]
    keep = part.keeper.copy()
    for group in _groups(findings, "train"):
        if len(np.unique(part.given[group])) > 1:
            keep[group] = False
            best = max(group, key=lambda k: right[k])
            keep[best] = right[best] >= bound
    return keep


def drop_leaks(findings: PictureFindings) -> np.ndarray:
    """(N,) which training samples to keep: those that are in no other split."""
    keep = np.ones(len(findings.splits["train"]), bool)
    for pairs in findings.leaks.values():
        keep[pairs[:, 1]] = False
    return keep


def faulty(findings: PictureFindings, split: str = "train", faults: tuple[str, ...] = tuple(FAULTS)) -> np.ndarray:
    """(N,) which samples have one of these faults."""
    part = findings.splits[split]
    out = np.zeros(len(part), bool)
    for fault in faults:
        out |= part.faults[fault]
    return out


def _groups(findings: PictureFindings, split: str) -> list[list[int]]:
    """The samples of a split by group of copies, the keeper first."""
    part = findings.splits[split]
    rows = np.flatnonzero(part.group >= 0)
    order = rows[np.lexsort((rows, ~part.keeper[rows], part.group[rows]))]
    cuts = np.flatnonzero(np.diff(part.group[order])) + 1
    return [group.tolist() for group in np.split(order, cuts)] if len(order) else []
