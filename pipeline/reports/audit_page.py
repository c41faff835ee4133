"""The page of an audit: rates by class, the most suspicious pictures, a filter; one file, no network."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.data.decode import DecodeError, decode
from pipeline.reports.audit import Findings, Rate, detection_quality, rates

if TYPE_CHECKING:
    from shards.reader import Split

THUMBNAIL = 72
MOST = 2400  # pictures on the page, so that it opens anywhere


def write_page(findings: Findings, split: Split, name: str, path: Path, per_class: int) -> None:
    classes = list(split.classes)
    found = rates(findings, len(classes))
    per_class = max(1, min(per_class, MOST // len(classes)))
    order = sorted((k for k in range(len(classes)) if found[k].total), key=lambda k: -found[k].share)
    body = [f"<h1>Label audit</h1><p>{escape(_summary(findings, name))}</p>"]
    body += [_rates(found, order, findings, classes), _filter(classes)]
    for k in order:
        rows = findings.worst_first(k)[:per_class]
        if not len(rows):
            continue
        title = f"{escape(classes[k])}: {len(rows)} of {found[k].flagged} suspicious"
        body.append(f"<section><h3>{title}</h3><div class='cards'>")
        body += [_card(int(row), key, findings, split, classes) for row, key in zip(rows, split.keys(rows))]
        body.append("</div></section>")
    page = _template("report.html").replace("{{body}}", _template("audit.html"))
    page = page.replace("{{title}}", "Label audit").replace("{{body}}", "\n".join(body))
    path.write_text(page, encoding="utf-8")


def _template(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def _summary(findings: Findings, name: str) -> str:
    flagged, total = int(findings.suspicious.sum()), len(findings.given)
    text = f"{flagged} of {total} labels look wrong ({flagged / max(total, 1):.1%}) to {name}. "
    text += f"Suspicious: {findings.rule}."
    judged = detection_quality(findings)
    if judged:
        text += (
            f" Against the true labels: precision {judged['precision']:.3f}, recall {judged['recall']:.3f}, "
            f"F1 {judged['f1']:.3f}; {judged['noise']:.1%} of the labels are wrong, "
            f"{judged['noise after correction']:.1%} after correction."
        )
    return text


def _rates(found: list[Rate], order: list[int], findings: Findings, classes: list[str]) -> str:
    known = findings.true >= 0
    note = "Share of labels that look wrong, with a 95 % interval for the chance of the sample; "
    note += "the model's own mistakes are not in it."
    header = [
        "samples",
        "suspicious",
        "share",
        "95 % interval",
        "",
        *(["really wrong"] if known.any() else []),
    ]
    columns = "".join(f"<th>{name}</th>" for name in header)
    out = [f"<h2>Noise by class</h2><p class='note'>{note}</p><div class='scroll'><table><thead><tr>"]
    out.append(f"<th class='left'>given label</th>{columns}<th class='left'>mostly taken for</th>")
    out.append("</tr></thead><tbody>")
    for k in order:
        low, high = found[k].interval
        bar = (
            f"<div class='bar'><i style='left:{100 * low:.1f}%;width:{100 * (high - low):.1f}%'></i>"
            f"<b style='left:{100 * found[k].share:.1f}%'></b></div>"
        )
        cells = [f"<td class='left'>{escape(classes[k])}</td><td>{found[k].total}</td><td>{found[k].flagged}</td>"]
        cells.append(f"<td>{found[k].share:.1%}</td><td>{low:.1%} to {high:.1%}</td><td class='left'>{bar}</td>")
        mine = findings.given == k
        if known.any():
            rows = mine & known
            wrong = (findings.true[rows] != k).mean() if rows.any() else np.nan
            cells.append(f"<td>{wrong:.1%}</td>")
        other = np.bincount(
            findings.suggested[mine & findings.suspicious & (findings.suggested != k)], minlength=len(classes)
        )
        top = [f"{escape(classes[j])} ({other[j]})" for j in np.argsort(-other, kind="stable")[:3] if other[j]]
        cells.append(f"<td class='left'>{', '.join(top)}</td>")
        out.append(f"<tr>{''.join(cells)}</tr>")
    return "".join(out) + "</tbody></table></div>"


def _filter(classes: list[str]) -> str:
    # A value of its own, because the text of an option loses its double spaces.
    choices = "<option value=''>any</option>"
    choices += "".join(f"<option value='{escape(name)}'>{escape(name)}</option>" for name in classes)
    return (
        "<h2>The most suspicious pictures</h2><div class='filter'>"
        f"<label>given<select id='given'>{choices}</select></label>"
        f"<label>suggested<select id='suggested'>{choices}</select></label>"
        "<label>confidence in the given label at most <span id='mostshown'>1.00</span>"
        "<input id='most' type='range' min='0' max='1' step='0.01' value='1'></label>"
        "<label>name contains<input id='text' type='search' size='14'></label>"
        "<span class='note' id='shown'></span></div>"
    )


def _card(row: int, key: str, findings: Findings, split: Split, classes: list[str]) -> str:
    given, suggested = classes[findings.given[row]], classes[findings.suggested[row]]
    data, small = thumbnail(split, row)
    image = (
        f"<img class='{'small' if small else ''}' alt='' src='data:image/jpeg;base64,{data}'>"
        if data
        else "<img alt='unreadable'>"
    )
    near = ", ".join(f"{classes[findings.given[k]]} (#{k})" for k in findings.neighbours[row])
    arrow = (
        f"<s>{escape(given)}</s> → <strong>{escape(suggested)}</strong>"
        if given != suggested
        else f"<s>{escape(given)}</s> doubted"
    )
    lines = [arrow, f"given {findings.score[row]:.2f}, suggested {findings.suggested_score[row]:.2f}"]
    if findings.weight is not None:
        lines.append(f"weight {findings.weight[row]:.2f}")
    epochs = int(findings.epochs_flagged[row])
    lines.append(f"flagged in {epochs} epoch{'s' if epochs != 1 else ''}")
    if findings.true[row] >= 0:
        lines.append(f"true: {escape(classes[findings.true[row]])}")
    attributes = (
        f"data-given='{escape(given)}' data-suggested='{escape(suggested)}' "
        f"data-score='{findings.score[row]:.4f}' data-key='{escape(key.lower())}'"
    )
    text = "<br>".join(lines) + f"<div class='key'>#{row} {escape(key)}</div>"
    return f"<div class='card' {attributes} title='nearest clean: {escape(near)}'>{image}<div>{text}</div></div>"


def thumbnail(split: Split, row: int) -> tuple[str, bool]:
    """(base64 of a JPEG, whether the picture is tiny); nothing for a picture that cannot be read."""
    from PIL import Image

    try:
        picture, _ = decode(split.read(row), 2 * THUMBNAIL)
    except DecodeError:
        return "", False
    image = Image.fromarray(np.ascontiguousarray(picture))
    small = max(image.size) < THUMBNAIL
    if not small:
        image.thumbnail((2 * THUMBNAIL, 2 * THUMBNAIL))
    file = io.BytesIO()
    image.save(file, "jpeg", quality=82 if not small else 95)
    return base64.b64encode(file.getvalue()).decode(), small
