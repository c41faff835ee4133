"""The corrected label list, from which new shards can be built. Pictures and labels of the source stay as they are.

What people decided comes first, and nothing else touches it. Without a person's decision a label is dropped or replaced only
where that is right with a probability above a bound; nothing, where the share of wrong labels might not fall; none of a class
that was not judged; and no class becomes empty. A label that is replaced wrongly does harm, so never more are replaced than
are surely wrong; a good picture that is dropped is only one picture less.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.reports.audit.decisions import DROP, Decisions
from pipeline.reports.audit.findings import Findings, wrong_share
from pipeline.reports.audit.judge import Judgement
from pipeline.reports.audit.shares import Share, estimate_of, judged_classes
from shards.config import VALIDATION

if TYPE_CHECKING:
    from pipeline.inference.open_run import OpenedRun
    from shards.config import BuildConfig
    from shards.reader import Split

How = Literal["drop", "relabel"]
RECORD = "build.json"  # what the shards were built from


@dataclass(frozen=True)
class Corrected:
    label: np.ndarray  # (N,) int
    keep: np.ndarray  # (N,) bool
    spared: list[int]  # classes of which nothing would have been left

    def changed(self, given: np.ndarray) -> np.ndarray:
        changed: np.ndarray = ~self.keep | (self.label != given)
        return changed


def corrected_labels(judgement: Judgement, classes: int, hows: Collection[How], bound: float, sure: int) -> Corrected:
    """Act where the estimated probability of being right about it is at least `bound`; `sure` labels are wrong for certain. With
    both ways a label is replaced where that is possible, else dropped."""
    given, other = judgement.given, judgement.other
    judged = judged_classes(given, classes)
    relabel = (judgement.other_right >= bound) & judged[given] & judged[other] & ("relabel" in hows)
    surest = np.argsort(-np.where(relabel, judgement.other_right, -1.0), kind="stable")
    relabel[surest[sure:]] = False
    drop = (1 - judgement.right >= bound) & judged[given] & ("drop" in hows) & ~relabel & (sure > 0)
    return spare_classes(given, np.where(relabel, other, given), ~drop, classes)


def spare_classes(given: np.ndarray, label: np.ndarray, keep: np.ndarray, classes: int) -> Corrected:
    """A class that would become empty keeps all labels given as such: shards need every class, and a model that finds no
    right label in a class knows nothing about it."""
    label, keep, spared = label.copy(), keep.copy(), set[int]()
    there = np.bincount(given, minlength=classes) > 0
    while True:
        empty = np.flatnonzero((np.bincount(label[keep], minlength=classes) == 0) & there)
        if not len(empty):
            return Corrected(label, keep, sorted(spared))
        spared |= set(empty.tolist())
        own = np.isin(given, empty)
        label[own], keep[own] = given[own], True


def surely_wrong(findings: Findings, classes: int) -> int:
    """So many labels are wrong at least: the lower end of the interval. Below a share of a few percent odd pictures cannot be
    told from wrong labels, and this is none."""
    share = wrong_share(findings, classes)
    return int(share.low * share.total) if share.judged else 0


def safe_ways(findings: Findings, classes: int, hows: Collection[How], bound: float) -> list[How]:
    """Those of the ways after which fewer labels are wrong, by the same correction of simulated labels: even the upper end of
    the share expected afterwards lies below the share estimated now.

    Simulated labels follow the judge's own beliefs. Where it takes two classes for each other, every second simulation turns
    out otherwise, so the interval is wide and nothing is done.
    """
    before, out = wrong_share(findings, classes), list[How]()
    for how in hows:
        after = expected_after(findings, classes, [how], bound)
        if after is not None and after.high < before.share:
            out.append(how)
    return out


def safe_correction(findings: Findings, classes: int, hows: Collection[How], bound: float) -> Corrected:
    """What is done to the labels without a person, by the safe ones of these ways."""
    assert findings.judgement is not None
    ways = safe_ways(findings, classes, hows, bound)
    return corrected_labels(findings.judgement, classes, ways, bound, surely_wrong(findings, classes))


def expected_after(findings: Findings, classes: int, hows: Collection[How], bound: float) -> Share | None:
    """The share of wrong labels in judged classes after this correction, with its interval; None if nothing is known."""
    if findings.judgement is None or len(findings.simulated) < 2:
        return None
    left, sure = [], surely_wrong(findings, classes)
    for one in (findings.judgement, *findings.simulated):
        done = corrected_labels(one, classes, hows, bound, sure)
        inside = done.keep & judged_classes(one.given, classes)[one.given]
        right = np.where(done.label == one.given, one.right, one.other_right)
        wrong = float(1 - right[inside].mean()) if inside.any() else 0.0
        truth = float((done.label != one.true)[inside].mean()) if one.true is not None and inside.any() else 0.0
        left.append((wrong, truth, int(inside.sum()), int(done.changed(one.given).sum())))
    own, rest = left[0], left[1:]
    return estimate_of(own[2], own[3], own[0], [wrong - truth for wrong, truth, _, _ in rest])


def with_decisions(corrected: Corrected, decisions: Decisions | None, given: np.ndarray, classes: int) -> Corrected:
    """What people decided stands, whatever the rest says. They may empty a class; nothing else may."""
    if decisions is None:
        return corrected
    by_people = decisions.action != 0
    label = np.where(by_people, decisions.label, corrected.label)
    keep = np.where(by_people, decisions.action != DROP, corrected.keep)
    done = spare_classes(given, label, keep, classes)
    return Corrected(
        np.where(by_people, label, done.label), np.where(by_people, keep, done.keep), [*corrected.spared, *done.spared]
    )


# -- the list --------------------------------------------------------------------------------------


def write_list(corrected: Corrected, opened: OpenedRun, splits: dict[str, Split], out: Path) -> str:
    """Write labels.csv; returns the command that builds shards from it.

    The validation part goes back to the training pictures, from which it was cut.
    """
    parts = {name: splits[name] for name in ("train", VALIDATION, "test") if name in splits}
    split, test = splits["train"], splits.get("test")
    roots = roots_of(opened.model.config.shards, split)
    by_path = roots is not None and all(
        (roots[name] / key).is_file() for name, part in parts.items() for key in part.keys(range(min(50, len(part))))
    )
    root = _shared(list(roots.values())) if by_path and roots else out / "pictures"
    with (out / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["path", "given", "true", *(["split"] if test else [])])
        for name, part in parts.items():
            below = Path(os.path.relpath(roots[name], root)) if by_path and roots else Path()
            paths = part.keys() if by_path else _copy_pictures(part, root, name)
            train = name == "train"
            labels, stays = (corrected.label, corrected.keep) if train else (part.given, np.ones(len(part), bool))
            for index in np.flatnonzero(stays):
                true = part.classes[part.true[index]] if part.true[index] >= 0 else ""
                row = [(below / paths[index]).as_posix(), part.classes[labels[index]], true]
                table.writerow([*row, *(["test" if name == "test" else "train"] if test else [])])
    words = ["python", "-m", "shards.build", "source=list", f"path={out / 'labels.csv'}", f"root={root}"]
    return shlex.join(words)


def roots_of(config: BuildConfig, split: Split) -> dict[str, Path] | None:
    """The folders that keys of training and test pictures start from; None if the source has no files.

    A training that was given finished shards does not know their source. The shards do.
    """
    options: dict[str, Any] = config.model_dump()
    record = split.store.read(RECORD, 1 << 20) if config.url else None
    if record is not None:
        try:
            options = json.loads(record)["options"]
        except (ValueError, KeyError, TypeError):  # of another version: pictures are copied instead
            return None
    if options.get("source") not in ("folder", "list", "webvision") or not options.get("path"):
        return None
    train, test = options["path"], options.get("validation_path") or options["path"]
    if options["source"] == "list":
        train, test = (options.get("root") or str(Path(path).parent) for path in (train, test))
    return {"train": Path(train), VALIDATION: Path(train), "test": Path(test)}


def _shared(folders: list[Path]) -> Path:
    """The folder that holds them all."""
    if len(set(folders)) == 1:
        return folders[0]
    common = Path(os.path.commonpath([folder.absolute() for folder in folders]))
    return common if any(folder.is_absolute() for folder in folders) else Path(os.path.relpath(common))


def _copy_pictures(split: Split, root: Path, name: str) -> list[str]:
    """Pictures whose source has no files of its own, or none any more, as files named by index."""
    (root / name).mkdir(parents=True, exist_ok=True)
    paths = []
    for index in range(len(split)):
        data = bytes(split.read(index))
        suffix = "jpg" if data[:2] == b"\xff\xd8" else "png" if data[:4] == b"\x89PNG" else "webp"
        paths.append(f"{name}/{index:09d}.{suffix}")
        (root / paths[-1]).write_bytes(data)
    return paths
