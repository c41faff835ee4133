"""Figures of one run, and of several runs in one figure.

`write_figures(folder, data)` plots whatever `data` allows and leaves out the rest. It also writes
`figures/data.json`, from which a report plots several runs in one figure. Keys of `data`, all optional:

    method, class_names, class_counts (K,)   clean samples per class
    history      [{"epoch": 0, "metrics": {"test/top1": 81.2, "loss/ce": 0.4, ...}}, ...]
    per_class_accuracy (K,)                  0..1, test set
    confusion (K,K)                          rows true, columns predicted
    marginal {head: (K,)}                    mean predicted distribution over the test set
    confidence {head: (K,)}                  mean confidence in the given label over the training set
    group_f1 {"many": .., ...}               F1 of clean-label detection, 0..1
    embedding (n,D), embedding_labels (n,)   a sample of the test set
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from pipeline.tracking.colors import DASHES, MARKERS, PALETTE, free_color, style

Data = dict[str, Any]
GROUPS = ("many", "medium", "few")
SCREEN, PRINT = 110, 200  # dots per inch
MOST_BARS = 5  # bars side by side; more runs become points
LONGEST = 60  # characters of a name


@dataclass(frozen=True)
class Run:
    """One line of a comparison."""

    label: str
    method: str
    data: Data


def write_figures(folder: str | Path, data: Data) -> list[Path]:
    """Write every figure the data allows into folder/figures; returns the files, data.json included."""
    out = Path(folder) / "figures"
    out.mkdir(parents=True, exist_ok=True)
    run = Run(str(data.get("method", "")), str(data.get("method", "")), data)
    files = []
    for name, plot in COMPARISON_PLOTS.items():
        figure = plot([run])
        if figure is not None:
            files.append(save(figure, out / f"{name}.png", PRINT))
    for name, plot_one in SINGLE_RUN_PLOTS.items():
        figure = plot_one(data)
        if figure is not None:
            files.append(save(figure, out / f"{name}.png", PRINT))
    plain = {key: _plain(value) for key, value in data.items() if key != "embedding"}
    (out / "data.json").write_text(json.dumps(plain), encoding="utf-8")
    files.append(out / "data.json")
    return files


def save(figure: Figure, path: Path, dpi: int = SCREEN) -> Path:
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=dpi, metadata={"Software": None})
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _has(data: Data, key: str) -> bool:
    value = data.get(key)
    return value is not None and len(value) > 0


def _new_figure(width: float = 6.4, height: float = 3.8, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(np.atleast_1d(figure.subplots(1, columns)))
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#dddddd", linewidth=0.7)
        ax.set_axisbelow(True)
    return figure, axes


def line_styles(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Each run's line style, by its method; a method's second run has another colour, other dashes and markers."""
    out: list[dict[str, Any]] = []
    turns: Counter[str] = Counter()
    taken = [str(style(method)["color"]) for method in dict.fromkeys(run.method for run in runs)]
    for run in runs:
        line_style, turn = style(run.method), turns[run.method]
        if turn:
            line_style = line_style | {"color": free_color(line_style["color"], taken)}
            taken.append(line_style["color"])
        dash, mark = DASHES.index(line_style["linestyle"]) + turn, MARKERS.index(line_style["marker"]) + turn
        out.append(line_style | {"linestyle": DASHES[dash % len(DASHES)], "marker": MARKERS[mark % len(MARKERS)]})
        turns[run.method] += 1
    return out


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    """A few names inside the figure, more of them below it."""
    entries: dict[str, Any] = {}
    for ax in axes:
        entries |= {name: handle for handle, name in zip(*ax.get_legend_handles_labels())}
    names = [name if len(name) <= LONGEST else name[: LONGEST - 1] + "…" for name in entries]
    longest = max(map(len, names))
    if len(names) <= 4 and longest <= 24 and len(axes) == 1:
        axes[0].legend(frameon=False, fontsize=8)
        return
    columns = min(len(names), 3 if longest <= 24 else 2 if longest <= 40 else 1)
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(names) / columns))
    figure.legend(entries.values(), names, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)


def series(data: Data, key: str) -> tuple[list[int], list[float]]:
    """(epochs, values) of a metric over the history."""
    points = [(h["epoch"], h["metrics"][key]) for h in data.get("history") or [] if key in h["metrics"]]
    return [epoch for epoch, _ in points], [value for _, value in points]


def _numbered_style(number: int) -> dict[str, Any]:
    """The style of a line that is not a method."""
    return {"color": PALETTE[number % 8], "linestyle": DASHES[number % 4], "marker": MARKERS[number % 8]}


def _classes_by_size(data: Data) -> np.ndarray:
    """Classes from the largest to the smallest."""
    counts = np.asarray(data["class_counts"]) if _has(data, "class_counts") else np.zeros(0)
    return np.argsort(-counts, kind="stable")


def _label_epochs(ax: Axes, runs: Sequence[Run]) -> None:
    """The x axis covers the whole training, also where a metric starts late."""
    last = max(history[-1]["epoch"] for run in runs if (history := run.data.get("history")))
    ax.set(xlabel="epoch", xlim=(0.5, last + max(0.5, last / 40)))
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))


def _label_classes(ax: Axes, data: Data, classes: np.ndarray) -> None:
    names = data.get("class_names")
    if names is not None and len(classes) <= 20:
        ax.set_xticks(range(len(classes)), [str(names[k])[:14] for k in classes])
        if max(len(str(name)) for name in names) > 4:
            ax.tick_params(axis="x", rotation=60)
        ax.set_xlabel("class, largest first")
    else:
        ax.set_xlabel(f"class (of {len(classes)}), largest first")


def _plot_class_line(ax: Axes, data: Data, values: Any, **line_style: Any) -> None:
    values = np.asarray(values, dtype=float)
    order = _classes_by_size(data) if _has(data, "class_counts") else np.arange(len(values))
    ax.plot(range(len(values)), values[order], markersize=4 if len(values) <= 30 else 0, linewidth=1.6, **line_style)


# -- figures of one run or of several --------------------------------------------------------------


def _plot_curves(runs: Sequence[Run], keys: dict[str, str], ylabel: str) -> Figure | None:
    """A metric over epochs, one line per run; several metrics side by side. Trainings of one epoch have no curve."""
    keys = {key: title for key, title in keys.items() if any(series(run.data, key)[0] for run in runs)}
    if all(len(run.data.get("history") or []) < 2 for run in runs):
        return None
    if not keys:
        return None
    figure, axes = _new_figure(3.6 * len(keys) if len(keys) > 1 else 6.4, 3.6 if len(keys) > 1 else 3.8, len(keys))
    for ax, (key, title) in zip(axes, keys.items()):
        for run, line_style in zip(runs, line_styles(runs)):
            epochs, values = series(run.data, key)
            if not epochs:
                continue
            every = max(1, len(epochs) // 12)
            ax.plot(epochs, values, label=run.label, markersize=4, markevery=every, linewidth=1.6, **line_style)
        ax.set(title=title)
        _label_epochs(ax, runs)
        if key in ("clean/share", "clean/f1"):
            ax.set_ylim(-0.03, 1.03)
    axes[0].set_ylabel(ylabel)
    if len(runs) > 1:
        _legend(figure, axes)
    return figure


def plot_accuracy(runs: Sequence[Run]) -> Figure | None:
    return _plot_curves(runs, {"test/top1": "accuracy on the test set"}, "percent")


def plot_cleaning(runs: Sequence[Run]) -> Figure | None:
    keys = {
        "clean/threshold": "threshold",
        "clean/share": "share taken for clean",
        "clean/f1": "F1 of clean labels",
    }
    return _plot_curves(runs, keys, "")


def plot_groups(runs: Sequence[Run]) -> Figure | None:
    """Accuracy and clean-F1 of many, medium and few."""
    accuracy = [{g: series(run.data, f"test/{g}")[1][-1:] for g in GROUPS} for run in runs]
    f1 = [{g: [100 * v] for g, v in (run.data.get("group_f1") or {}).items() if v is not None} for run in runs]
    panels = {"accuracy by class size": accuracy, "F1 of clean labels by class size": f1}
    panels = {title: rows for title, rows in panels.items() if any(_finite_values(row) for row in rows)}
    if not panels:
        return None
    figure, axes = _new_figure(7.6 if len(panels) > 1 else 6.4, 4.2, len(panels))
    for ax, (title, rows) in zip(axes, panels.items()):
        width = 0.8 / len(runs)
        for place, (run, row, own) in enumerate(zip(runs, rows, line_styles(runs))):
            values = _finite_values(row)
            if not values:
                continue
            if len(runs) > MOST_BARS:
                at = [float(GROUPS.index(g)) for g in values]
                ax.plot(at, list(values.values()), label=run.label, markersize=5, linewidth=1, **own)
                continue
            at = [GROUPS.index(g) + (place - (len(runs) - 1) / 2) * width for g in values]
            bar_style = {"color": own["color"], "hatch": ["", "//", "..", "xx", "\\\\"][place % 5]}
            bars = ax.bar(at, list(values.values()), width * 0.92, label=run.label, edgecolor="white", **bar_style)
            ax.bar_label(bars, fmt="%.0f", fontsize=7)
        ax.set(title=title, xlim=(-0.6, 2.6), ylim=(0, 109))
        ax.set_xticks(range(3), ["many\n(>100)", "medium\n(20-100)", "few\n(<20)"])
    axes[0].set_ylabel("percent")
    if len(runs) > 1:
        _legend(figure, axes)
    return figure


def _finite_values(row: dict[str, list[float]]) -> dict[str, float]:
    return {g: row[g][0] for g in GROUPS if row.get(g) and math.isfinite(row[g][0])}


def plot_marginal(runs: Sequence[Run]) -> Figure | None:
    """Mean predicted distribution over the test set; without bias it is flat."""
    return _plot_per_head(runs, "marginal", "marginal likelihood on the test set", "p(class)", uniform=True)


def plot_confidence(runs: Sequence[Run]) -> Figure | None:
    return _plot_per_head(
        runs, "confidence", "confidence in the given label, training set", "mean confidence", uniform=False
    )


def _plot_per_head(runs: Sequence[Run], key: str, title: str, ylabel: str, uniform: bool) -> Figure | None:
    runs = [run for run in runs if _has(run.data, key)]
    if not runs:
        return None
    figure, (ax,) = _new_figure()
    for run, own in zip(runs, line_styles(runs)):
        heads = list(run.data[key].items())
        if len(runs) > 1:  # the main head, and the linear one to compare with
            heads = heads[:1] + [head for head in heads[1:] if head[0] == "linear"]
        for number, (head, values) in enumerate(heads):
            line_style = own if len(runs) > 1 else _numbered_style(number)
            if number and len(runs) > 1:
                line_style = line_style | {"linestyle": ":", "alpha": 0.7}
            label = f"{head} head" if len(runs) == 1 else f"{run.label}, {head}"
            _plot_class_line(ax, run.data, values, label=label, **line_style)
    data = runs[0].data
    classes = len(next(iter(data[key].values())))
    if uniform:
        ax.axhline(1 / classes, color="#777777", linewidth=1, label="uniform")
    _label_classes(ax, data, _classes_by_size(data) if _has(data, "class_counts") else np.arange(classes))
    ax.set(title=title, ylabel=ylabel)
    ax.set_ylim(bottom=0)
    _legend(figure, [ax])
    return figure


def plot_class_size(runs: Sequence[Run]) -> Figure | None:
    """Accuracy of each class against how many pictures it had."""
    runs = [run for run in runs if _has(run.data, "per_class_accuracy") and _has(run.data, "class_counts")]
    if not runs:
        return None
    figure, (ax,) = _new_figure()
    for run, line_style in zip(runs, line_styles(runs)):
        counts, accuracy = (np.asarray(run.data[key], float) for key in ("class_counts", "per_class_accuracy"))
        accuracy = 100 * accuracy
        ax.scatter(
            counts, accuracy, s=26, color=line_style["color"], marker=line_style["marker"], label=run.label, alpha=0.8
        )
        if len(runs) == 1 and len(counts) <= 20 and _has(run.data, "class_names"):
            _name_points(ax, counts, accuracy, run.data["class_names"])
    ax.set(title="accuracy of each class against its size", ylabel="percent", ylim=(-3, 103), xscale="log")
    ax.set_xlabel("training pictures of the class (log scale)")
    ax.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(ScalarFormatter())
    ax.xaxis.set_minor_formatter(NullFormatter())
    if len(runs) > 1:
        _legend(figure, [ax])
    return figure


def _name_points(ax: Axes, counts: np.ndarray, accuracy: np.ndarray, names: Sequence[str]) -> None:
    """The name of each class beside its point: left of it on the right half, and lower where another name is already."""
    across = np.log(np.maximum(counts, 1))
    across = (across - across.min()) / max(float(np.ptp(across)), 1e-9)
    taken: list[tuple[float, float]] = []
    for x, count, value, name in sorted(zip(across, counts, accuracy, names)):
        left, drop = x > 0.5, 0
        while any(abs(x - there) < 0.22 and abs(value - drop - at) < 5 for there, at in taken):
            drop += 5
        taken.append((x, value - drop))
        offset = (-5 if left else 5, 3 - drop * 1.9)  # a percent is about two points high
        side = "right" if left else "left"
        ax.annotate(str(name)[:12], (count, value), fontsize=7, xytext=offset, textcoords="offset points", ha=side)


COMPARISON_PLOTS = {
    "accuracy": plot_accuracy,
    "groups": plot_groups,
    "cleaning": plot_cleaning,
    "marginal": plot_marginal,
    "confidence": plot_confidence,
    "class_size": plot_class_size,
}


# -- figures of one run only -----------------------------------------------------------------------


def plot_losses(data: Data) -> Figure | None:
    keys = sorted({k for h in data.get("history") or [] for k in h["metrics"] if k.startswith("loss/")})
    if not keys:
        return None
    figure, (ax,) = _new_figure()
    for number, key in enumerate(keys):
        epochs, values = series(data, key)
        every = max(1, len(epochs) // 12)
        name = key.removeprefix("loss/")
        ax.plot(epochs, values, label=name, markersize=4, markevery=every, **_numbered_style(number))
    ax.set(title="parts of the loss", ylabel="mean over the epoch")
    _label_epochs(ax, [Run("", "", data)])
    _legend(figure, [ax])
    return figure


def plot_confusion(data: Data) -> Figure | None:
    if not _has(data, "confusion"):
        return None
    counts = np.asarray(data["confusion"], dtype=float)
    share = 100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)
    figure, (ax,) = _new_figure(5.4, 4.8)
    image = ax.imshow(share, cmap="cividis", vmin=0, vmax=100)
    ax.grid(False)
    figure.colorbar(image, ax=ax, label="percent of the true class")
    if len(share) <= 12:
        for row, column in np.ndindex(*share.shape):
            if share[row, column] >= 0.5:
                colour = "black" if share[row, column] > 55 else "white"
                text = f"{share[row, column]:.0f}"
                ax.text(column, row, text, ha="center", va="center", color=colour, fontsize=7)
    names = data.get("class_names")
    if names is not None and len(share) <= 20:
        shown = [str(name)[:12] for name in names]
        ax.set_yticks(range(len(share)), shown)
        ax.set_xticks(range(len(share)), shown, rotation=60 if max(map(len, shown)) > 3 else 0)
    ax.set(title="confusion on the test set", xlabel="predicted", ylabel="true")
    return figure


def plot_embedding(data: Data) -> Figure | None:
    """Test embeddings in two dimensions by t-SNE; distances between far groups mean little."""
    if not _has(data, "embedding") or len(data["embedding"]) < 10:
        return None
    from sklearn.manifold import TSNE

    points, labels = (
        np.asarray(data["embedding"], np.float32)[:500],
        np.asarray(data["embedding_labels"])[:500],
    )
    perplexity = min(30.0, (len(points) - 1) / 3)
    flat = TSNE(2, perplexity=perplexity, init="pca", max_iter=400, random_state=0).fit_transform(points)
    figure, (ax,) = _new_figure(6.4, 5.2)
    classes = np.unique(labels)
    names = data.get("class_names")
    for place, k in enumerate(classes):
        name = str(names[int(k)])[:14] if names is not None else str(k)
        marker_style: Any = {"color": PALETTE[place % 8], "marker": MARKERS[(place + place // 8) % 8]}
        across, up = flat[labels == k].T
        shown = name if place < 20 else None
        ax.scatter(across, up, s=14, linewidths=0, alpha=0.8, label=shown, **marker_style)
    ax.set(title=f"test embeddings (t-SNE of {len(points)})", xticks=[], yticks=[])
    ax.spines[["left", "bottom"]].set_visible(False)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8, markerscale=2)
    return figure


SINGLE_RUN_PLOTS = {"losses": plot_losses, "confusion": plot_confusion, "embedding": plot_embedding}
