"""The label audit: confidence of model and method in every training label, and the corrected label list."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pipeline.inference.open_run import OpenedRun
    from shards.config import BuildConfig
    from shards.reader import Split

NEIGHBOURS = 3
ALL_QUERIES = 50_000  # up to here every sample gets its neighbours, above only the suspicious ones
CANDIDATES = 200_000  # clean samples that neighbours are looked for among
SIMILARITIES = 1 << 25  # in memory at a time


@dataclass
class Findings:
    """What model and method say about every training sample, by permanent index."""

    given: np.ndarray  # (N,) int
    true: np.ndarray  # (N,) int, -1: unknown
    suggested: np.ndarray  # (N,) int
    score: np.ndarray  # (N,) confidence in the given label
    suggested_score: np.ndarray  # (N,) confidence in the suggested one
    weight: np.ndarray | None  # (N,) of the method, if it weights samples
    epochs_flagged: np.ndarray  # (N,) int
    suspicious: np.ndarray  # (N,) bool
    rule: str  # when a sample counts as suspicious
    neighbours: list[list[int]]

    def worst_first(self, label: int) -> np.ndarray:
        """Indices of suspicious samples with this given label, lowest confidence first."""
        indices = np.flatnonzero(self.suspicious & (self.given == label))
        return indices[np.lexsort((-self.suggested_score[indices], self.score[indices]))]


@dataclass(frozen=True)
class Rate:
    """Share of a class's labels that look wrong, with a 95 % interval (Wilson) for the sampling error.

    The interval does not cover mistakes of the detector.
    """

    flagged: int
    total: int

    @property
    def share(self) -> float:
        return self.flagged / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        if not self.total:
            return 0.0, 1.0
        z, n, p = 1.959964, self.total, self.share
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        return max(0.0, middle - half), min(1.0, middle + half)


# -- one pass over the training set ----------------------------------------------------------------


def audit_labels(opened: OpenedRun, split: Split, threshold: float | None = None) -> Findings:
    """Evaluate every training sample once and combine what model and method say about it."""
    given, true = split.given.astype(np.int64), split.true.astype(np.int64)
    beliefs = _beliefs(opened, len(split))
    refined = beliefs["label"].astype(np.int64) if threshold is None and "label" in beliefs else None
    score, suggested, suggested_score, embedding = _survey(opened, split, refined)
    weight, flagged = beliefs.get("weight"), beliefs.get("flagged")
    if threshold is not None:
        suspicious, rule = score <= threshold, f"confidence in the given label is at most {threshold:g}"
    elif "clean" in beliefs:
        suspicious, rule = ~beliefs["clean"].astype(bool), "the method did not trust the label in its last epoch"
    else:
        suspicious, rule = suggested != given, "the model prefers another label"
    if flagged is None:
        flagged = suspicious.astype(np.int64)
    neighbours = _neighbours(embedding, suspicious, score)
    return Findings(
        given,
        true,
        suggested,
        score,
        suggested_score,
        weight,
        flagged.astype(np.int64),
        suspicious,
        rule,
        neighbours,
    )


def _survey(opened: OpenedRun, split: Split, refined: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """(confidence in the given label, suggestion, confidence in it, embedding) of every sample. The suggestion is
    the method's refined label where there is one, else the model's prediction."""
    import torch

    from pipeline.data.loader import open_loader

    model, method, config = opened.model, opened.model.method, opened.model.config
    loader = open_loader(split, config.data, config.seed, method.world, 1, config.model.channels_last)
    parts: list[list[np.ndarray]] = [[], [], [], []]
    with torch.no_grad():
        for index, images in loader.survey():
            scores = model.scores(images)
            samples = index.cpu().numpy()
            best = scores.argmax(1) if refined is None else refined[samples]
            rows, label = np.arange(len(samples)), split.given[samples]
            vectors = method.embeddings(images).float().cpu().numpy()
            for part, value in zip(parts, (scores[rows, label], best, scores[rows, best], vectors)):
                part.append(value)
    score, suggested, suggested_score, embedding = (np.concatenate(part) for part in parts)
    return score, suggested.astype(np.int64), suggested_score, embedding


def _beliefs(opened: OpenedRun, samples: int) -> dict[str, np.ndarray]:
    """weight, label, clean and flagged by sample, as far as the checkpoint has them."""
    method = opened.model.method
    if opened.position is None or len(method.data) != samples:
        return {}
    tensors: dict[str, Any] = {}
    beliefs = method.beliefs
    if beliefs is not None:
        tensors = {"weight": beliefs.weight, "label": beliefs.label, "clean": beliefs.clean}
    tensors["flagged"] = getattr(method, "flagged", None)
    return {name: value.cpu().numpy() for name, value in tensors.items() if value is not None}


def _neighbours(embedding: np.ndarray, suspicious: np.ndarray, score: np.ndarray) -> list[list[int]]:
    """Indices of the nearest clean samples; for suspicious samples only, if there are very many."""
    import torch

    from pipeline.methods.parts.nearest_neighbors import nearest_neighbors

    clean = np.flatnonzero(~suspicious)
    if len(clean) > CANDIDATES:
        clean = np.sort(np.random.default_rng(0).choice(clean, CANDIDATES, replace=False))
    queries = np.arange(len(embedding))
    if len(queries) > ALL_QUERIES:
        queries = np.flatnonzero(suspicious)
        queries = queries[np.argsort(score[queries], kind="stable")][:ALL_QUERIES]
    out: list[list[int]] = [[] for _ in range(len(embedding))]
    if not len(clean):
        return out
    own = np.searchsorted(clean, queries).clip(max=len(clean) - 1)
    own[clean[own] != queries] = -1  # a suspicious sample is not among the candidates
    query, bank = (torch.from_numpy(embedding[rows].astype(np.float32)) for rows in (queries, clean))
    block = max(1, SIMILARITIES // len(clean))
    similarity, nearest = nearest_neighbors(query, bank, NEIGHBOURS, torch.from_numpy(own), block)
    exists = (similarity > -torch.inf).numpy()  # false where there are fewer clean samples than asked for
    for index, neighbours, found in zip(queries, clean[nearest.numpy()], exists):
        out[index] = neighbours[found].tolist()
    return out


def rates(findings: Findings, classes: int) -> list[Rate]:
    total = np.bincount(findings.given, minlength=classes)
    flagged = np.bincount(findings.given[findings.suspicious], minlength=classes)
    return [Rate(int(f), int(n)) for f, n in zip(flagged, total)]


def detection_quality(findings: Findings) -> dict[str, float] | None:
    """Precision, recall, F1 and AUC of finding wrong labels; None where the true labels are not known."""
    from pipeline.evaluation.metrics import detection, roc_auc

    known = findings.true >= 0
    if not known.any():
        return None
    wrong = (findings.given != findings.true)[known]
    out = detection(wrong, findings.suspicious[known])
    out["noise"] = float(wrong.mean())
    right_after = np.where(findings.suspicious, findings.suggested, findings.given)[known] == findings.true[known]
    out["noise after correction"] = float(1 - right_after.mean())
    area = roc_auc(wrong, -findings.score[known])
    return out if area is None else {**out, "auc": area}


# -- files -----------------------------------------------------------------------------------------


def write_tables(findings: Findings, split: Split, out: Path) -> None:
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    names = np.asarray(split.classes, dtype=object)
    known = findings.true >= 0
    columns: dict[str, Any] = {
        "index": pa.array(np.arange(len(split)), pa.int64()),
        "key": pa.array(split.keys(), pa.string()),
        "given": pa.array(names[findings.given], pa.string()),
        "suggested": pa.array(names[findings.suggested], pa.string()),
        "suspicious": pa.array(findings.suspicious),
        "score": pa.array(findings.score.astype(np.float32)),
        "suggested_score": pa.array(findings.suggested_score.astype(np.float32)),
        "weight": pa.array(np.ones(len(split), np.float32) if findings.weight is None else findings.weight),
        "epochs_flagged": pa.array(findings.epochs_flagged),
        "neighbours": pa.array(findings.neighbours, pa.list_(pa.int64())),
    }
    if known.any():
        columns["true"] = pa.array([name if k else None for name, k in zip(names[findings.true], known)], pa.string())
    table = pa.table(columns)
    pa.parquet.write_table(table, out / "audit.parquet")
    column = table.column_names.index("neighbours")
    joined = pa.array([" ".join(map(str, few)) for few in findings.neighbours], pa.string())
    pa.csv.write_csv(table.set_column(column, "neighbours", joined), out / "audit.csv")


def corrected_labels(findings: Findings, classes: int, how: str) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """(label, whether to keep it) of every sample, and the classes whose given labels stay unchanged.

    A class that would become empty is one the model never learned: its suggestions for that class are no better than
    the given labels, and shards need every class.
    """
    doubted, spared = findings.suspicious.copy(), set[int]()
    while True:
        keep = ~doubted if how == "drop" else np.ones(len(doubted), bool)
        label = np.where(doubted, findings.suggested, findings.given)
        left = np.bincount(label[keep], minlength=classes)
        empty = set(np.flatnonzero((left == 0) & (np.bincount(findings.given, minlength=classes) > 0)).tolist())
        if not empty:
            return label, keep, sorted(spared)
        spared |= empty
        doubted &= ~np.isin(findings.given, list(empty))


def apply(findings: Findings, opened: OpenedRun, split: Split, test: Split | None, out: Path, how: str) -> str:
    """Write the corrected label list; returns the command that builds shards from it."""
    import csv

    label, keep, spared = corrected_labels(findings, len(split.classes), how)
    if spared:
        names = ", ".join(split.classes[k] for k in spared[:10]) + (", ..." if len(spared) > 10 else "")
        print(f"nothing would be left of {names}: labels given as such are kept as they are")
    roots = _roots(opened.model.config.shards)
    parts = {"train": split} | ({"test": test} if test else {})
    firsts = [roots[name] / key for name, part in parts.items() for key in part.keys(range(min(50, len(part))))]
    by_path = bool(opened.model.config.shards.path) and all(file.is_file() for file in firsts)
    root = _shared(list(roots.values())) if by_path else out / "pictures"
    with (out / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["path", "given", "true", *(["split"] if test else [])])
        for name, part in parts.items():
            below = Path(os.path.relpath(roots[name], root)) if by_path else Path()
            paths = part.keys() if by_path else _copy_pictures(part, root, name)
            labels, stays = (label, keep) if name == "train" else (part.given, np.ones(len(part), bool))
            for index in np.flatnonzero(stays):
                true = part.classes[part.true[index]] if part.true[index] >= 0 else ""
                row = [(below / paths[index]).as_posix(), part.classes[labels[index]], true]
                table.writerow([*row, *([name] if test else [])])
    words = ["python", "-m", "shards.build", "source=list", f"path={out / 'labels.csv'}", f"root={root}"]
    return shlex.join(words)


def _roots(config: BuildConfig) -> dict[str, Path]:
    """The folders that keys of training and test pictures start from, if the source has files at all."""
    train, test = config.path or ".", config.validation_path or config.path or "."
    if config.source == "list":
        train, test = (config.root or str(Path(path).parent) for path in (train, test))
    return {"train": Path(train), "test": Path(test)}


def _shared(folders: list[Path]) -> Path:
    """The folder that holds them all."""
    if len(set(folders)) == 1:
        return folders[0]
    common = Path(os.path.commonpath([folder.absolute() for folder in folders]))
    return common if any(folder.is_absolute() for folder in folders) else Path(os.path.relpath(common))


def _copy_pictures(split: Split, root: Path, name: str) -> list[str]:
    """Pictures whose source has no files of its own, as files named by index."""
    (root / name).mkdir(parents=True, exist_ok=True)
    paths = []
    for index in range(len(split)):
        data = bytes(split.read(index))
        suffix = "jpg" if data[:2] == b"\xff\xd8" else "png" if data[:4] == b"\x89PNG" else "webp"
        paths.append(f"{name}/{index:09d}.{suffix}")
        (root / paths[-1]).write_bytes(data)
    return paths
