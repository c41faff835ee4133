"""What model and method say about every training label."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.reports.audit.judge import Judgement, judge, stored_features, typicality
from pipeline.reports.audit.shares import Share, by_class, overall

if TYPE_CHECKING:
    from pipeline.inference.open_run import OpenedRun
    from shards.features import FeatureSplit
    from shards.reader import Split

OUTLIER = 0.1  # typicality of a suspicious picture below which it is taken for one of no class
NEIGHBOURS = 3
ALL_QUERIES = 50_000  # up to here every sample gets its neighbours, above only the suspicious ones
CANDIDATES = 200_000  # clean samples that neighbours are looked for among
SIMILARITIES = 1 << 25  # in memory at a time


@dataclass
class Findings:
    """What is thought of every training sample, by permanent index. N samples, K classes."""

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
    training_score: np.ndarray | None = None  # (N,) confidence of the trained model, which has learned the label
    typicality: np.ndarray | None = None  # (N,) near 0: like none of the classes
    outlier: np.ndarray | None = None  # (N,) bool
    judgement: Judgement | None = None  # out of sample; None: the model has judged what it learned
    simulated: list[Judgement] = field(default_factory=list)

    def worst_first(self, label: int) -> np.ndarray:
        """Indices of suspicious samples with this given label, lowest confidence first."""
        indices = np.flatnonzero(self.suspicious & (self.given == label))
        return indices[np.lexsort((-self.suggested_score[indices], self.score[indices]))]


def rates(findings: Findings, classes: int) -> list[Share]:
    """The share of wrong labels by given label."""
    return by_class(findings.judgement, findings.simulated, findings.given, findings.suspicious, classes)


def wrong_share(findings: Findings, classes: int) -> Share:
    """The share of wrong labels, of all that are judged."""
    return overall(findings.judgement, findings.simulated, findings.given, findings.suspicious, classes)


def summary_line(findings: Findings, everything: Share) -> str:
    flagged, total = int(findings.suspicious.sum()), len(findings.given)
    if everything.judged:
        outliers = 0 if findings.outlier is None else int(findings.outlier.sum())
        return (
            f"About {everything.share:.1%} of {everything.total} labels are wrong ({everything.low:.1%} to {everything.high:.1%}); "
            f"{flagged} are listed as suspicious, {outliers} of them as pictures of no class."
        )
    if findings.judgement is None:
        return (
            f"{flagged} of {total} labels look wrong to the model that has learned them: a weak judgement. For a better one compute "
            "features (python -m pipeline.embed SHARDS --config photos) and add features=FOLDER."
        )
    return f"{flagged} of {total} labels look wrong; no share is estimated (too few labels, or simulations below 2)."


def audit_labels(
    opened: OpenedRun,
    split: Split,
    threshold: float | None = None,
    features: FeatureSplit | None = None,
    simulations: int = 6,
    done: Callable[[], None] = lambda: None,
) -> Findings:
    """Evaluate every training sample once and combine what is said about it.

    With stored features the labels are judged out of sample; else by what model and method say, who have learned them.
    """
    given, true = split.given.astype(np.int64), split.true.astype(np.int64)
    beliefs = _beliefs(opened, len(split))
    refined = beliefs["label"].astype(np.int64) if threshold is None and "label" in beliefs else None
    score, suggested, suggested_score, embedding = _survey(opened, split, refined)
    flagged, suspicious, rule = beliefs.get("flagged"), suggested != given, "the model prefers another label"
    findings = Findings(
        given, true, suggested, score, suggested_score, beliefs.get("weight"), given, suspicious, rule, []
    )
    findings.training_score = score
    if features is not None:
        embedding = _judge(findings, features, opened.model.config.seed, len(split.classes), simulations, done)
    elif "clean" in beliefs:
        findings.score = beliefs.get("score", score).astype(score.dtype)
        findings.suspicious = ~beliefs["clean"].astype(bool)
        findings.rule = "the method did not trust the label in its last epoch"
    if threshold is not None:
        findings.suspicious = findings.score <= threshold
        findings.rule = f"confidence in the given label is at most {threshold:g}"
    findings.epochs_flagged = (findings.suspicious if flagged is None else flagged).astype(np.int64)
    findings.neighbours = _neighbours(embedding, findings.suspicious, findings.score)
    return findings


def _judge(
    findings: Findings,
    features: FeatureSplit,
    seed: int,
    classes: int,
    simulations: int,
    done: Callable[[], None],
) -> np.ndarray:
    """Replace what the model says by what models say that have not learned the labels; returns the features."""
    import torch

    from pipeline.methods.options import LatentOptions

    stored = stored_features(features, len(findings.given))
    components = LatentOptions().components
    judgement, simulated = judge(torch.from_numpy(stored), findings.given, classes, seed, components, simulations, done)
    believe(findings, judgement, simulated, stored)
    return stored


def believe(findings: Findings, judgement: Judgement, simulated: list[Judgement], features: np.ndarray) -> None:
    """What models say that have not learned the labels, in place of what was said so far."""
    from pipeline.methods.latent import KEEP_ABOVE

    findings.judgement, findings.simulated = judgement, simulated
    findings.score, findings.suspicious = judgement.right, judgement.right < KEEP_ABOVE
    findings.rule = "models that have not learned the label say it is more likely wrong than right"
    other = findings.suspicious | (judgement.other_right > judgement.right)
    findings.suggested = np.where(other, judgement.other, findings.given)
    findings.suggested_score = np.where(other, judgement.other_right, judgement.right)
    findings.typicality = typicality(features, judgement.right, ~findings.suspicious)
    findings.outlier = findings.suspicious & (findings.typicality < OUTLIER)


def _survey(opened: OpenedRun, split: Split, refined: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """(confidence in the given label, suggestion, confidence in it, embedding) of every sample. The suggestion is
    the method's refined label where there is one, else the model's prediction."""
    import torch

    model, method = opened.model, opened.model.method
    loader = opened.loader(split, method.world)
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
    """weight, label, clean, score and flagged by sample, as far as the checkpoint has them."""
    method = opened.model.method
    if opened.position is None or len(method.data) != samples:
        return {}
    tensors: dict[str, Any] = {}
    beliefs = method.beliefs
    if beliefs is not None:
        tensors = {"weight": beliefs.weight, "label": beliefs.label, "clean": beliefs.clean}
        tensors["score"] = beliefs.score if beliefs.out_of_sample else None
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


def detection_quality(findings: Findings) -> dict[str, float] | None:
    """Precision, recall, F1 and AUC of finding wrong labels; None where the true labels are not known."""
    from pipeline.evaluation.metrics import detection, roc_auc

    known = findings.true >= 0
    if not known.any():
        return None
    wrong = (findings.given != findings.true)[known]
    out = detection(wrong, findings.suspicious[known])
    out["noise"] = float(wrong.mean())
    area = roc_auc(wrong, -findings.score[known])
    return out if area is None else {**out, "auc": area}
