"""What is wrong with samples. Each kind of trouble has a tab on the page."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pipeline.reports.audit.findings import Findings


@dataclass(frozen=True)
class Issue:
    """One thing that is wrong with some samples of a split."""

    id: str
    title: str
    explanation: str  # one sentence
    samples: np.ndarray  # (n,) indices, worst first; of groups: group after group, the one to keep first
    scores: np.ndarray  # (n,)
    groups: list[list[int]] = field(default_factory=list)  # samples that belong together; none: each stands alone
    notes: list[str] = field(default_factory=list)  # a sentence for each sample, in place of what is said of its label

    @property
    def partners(self) -> dict[int, int]:
        """Of every sample that is not the one to keep: the one that is."""
        return {other: group[0] for group in self.groups for other in group[1:]}


def label_issues(findings: Findings) -> list[Issue]:
    """Wrong labels and, apart from them, pictures of no class; the worst first."""
    outlier = np.zeros(len(findings.given), bool) if findings.outlier is None else findings.outlier
    wrong = f"The label is probably wrong: {findings.rule}."
    strange = "The picture is like none of the classes: its label is probably wrong, and no other label may be right."
    found = [_issue(findings, "wrong_label", "Wrong labels", wrong, findings.suspicious & ~outlier)]
    if outlier.any():
        found.append(_issue(findings, "outlier", "Pictures of no class", strange, outlier))
    return found


def _issue(findings: Findings, id: str, title: str, explanation: str, flags: np.ndarray) -> Issue:
    found = np.flatnonzero(flags)
    worst = found[np.lexsort((-findings.suggested_score[found], findings.score[found]))]
    return Issue(id, title, explanation, worst, findings.score[worst])
