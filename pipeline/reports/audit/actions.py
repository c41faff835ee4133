"""`apply=`: what is done to the label list, by people's decisions or without them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from pipeline.reports.audit.corrections import (
    Corrected,
    How,
    expected_after,
    safe_correction,
    safe_ways,
    spare_classes,
    with_decisions,
)
from pipeline.reports.audit.decisions import Decisions
from pipeline.reports.audit.findings import Findings, wrong_share
from pipeline.reports.audit.pictures import drop_duplicates, drop_leaks, faulty
from pipeline.reports.audit.shares import judged_classes
from shards.base.errors import UserError

if TYPE_CHECKING:
    from shards.findings import PictureFindings

OF_LABELS: tuple[How, ...] = ("relabel", "drop")
OF_PICTURES = ("drop-duplicates", "drop-leaks", "drop-faulty")


def corrected_by(
    actions: Collection[str],
    findings: Findings,
    pictures: PictureFindings | None,
    decisions: Decisions | None,
    classes: int,
    bound: float,
) -> Corrected:
    """All that was asked for, at once. People's decisions stand; no class becomes empty but by them."""
    given = findings.given
    label, keep = given, np.ones(len(given), bool)
    hows = [how for how in OF_LABELS if how in actions]
    if hows or "drop-outliers" in actions:
        if findings.judgement is None or findings.outlier is None or len(findings.simulated) < 2:
            raise UserError(
                f"apply={','.join(actions)} needs labels judged by models that have not learned them, with simulations of at least "
                "2. Compute features (python -m pipeline.embed SHARDS --config photos) and add features=FOLDER. "
                "Tables and page are written."
            )
        if hows:
            done = safe_correction(findings, classes, hows, bound)
            label, keep = done.label, done.keep
        if "drop-outliers" in actions:
            keep = keep & ~(findings.outlier & judged_classes(given, classes)[given])
    if set(OF_PICTURES) & set(actions):
        if pictures is None:
            raise UserError("The pictures were not looked at: add pictures=true. Tables and page are written.")
        if "drop-duplicates" in actions:
            right = findings.score if findings.judgement is not None else np.zeros(len(given))
            keep = keep & drop_duplicates(pictures, right, bound)
        if "drop-leaks" in actions:
            keep = keep & drop_leaks(pictures)
        if "drop-faulty" in actions:
            keep = keep & ~faulty(pictures)
    return with_decisions(spare_classes(given, label, keep, classes), decisions, given, classes)


def forecast(actions: Collection[str], findings: Findings, classes: int, bound: float) -> str:
    """The share of wrong labels before and after what is done to labels without a person; nothing where it is not known."""
    hows = [how for how in OF_LABELS if how in actions]
    ways = safe_ways(findings, classes, hows, bound)
    before, after = wrong_share(findings, classes), expected_after(findings, classes, ways, bound) if hows else None
    if not before.judged or after is None:
        return ""
    text = f"wrong labels, estimated: {before.share:.1%} ({before.low:.1%} to {before.high:.1%}) before, "
    text += f"{after.share:.1%} ({after.low:.1%} to {after.high:.1%}) after"
    for how in (how for how in hows if how not in ways):
        text += f"\n{how} changes nothing: it is not certain that fewer labels would be wrong. Review them on the page"
    return text
