"""Runs from MLflow, grouped for comparison, and the paper's tables to compare them with."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoints.upgrade import upgrade_params
from pipeline.config import Config
from pipeline.tracking.final_metrics import with_old_names
from pipeline.tracking.tracker import DRAW
from shards.base.errors import UserError
from shards.base.redact import redact
from shards.base.settings import Effect, effect_of
from shards.config import BIASED_BY_NATURE, BuildConfig
from shards.names import OWN_DATA, imbalance, name_of_source

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PAPER = Path(__file__).with_name("paper_tables.json")
MANIFEST, BIAS_SEED = "manifest", "shards.bias_seed"


@dataclass(frozen=True)
class Result:
    """One MLflow run, reduced to what reports need."""

    run_id: str
    name: str
    status: str
    params: dict[str, str]
    metrics: dict[str, float]
    tags: dict[str, str]
    figures: dict[str, Any] = field(default_factory=dict, repr=False)  # figures/data.json
    experiment_id: str = ""

    @property
    def method(self) -> str:
        return self.params.get("method.name", self.tags.get("method", "?"))

    @property
    def source(self) -> str:
        return self.tags.get("source") or self.tags.get("dataset") or self.params.get("shards.source", "?")

    @property
    def data_name(self) -> str:
        """The data set's own name; runs before it was a tag have the path of their pictures, if any."""
        named = self.tags.get("dataset", "") if "source" in self.tags else ""
        return named or name_of_source(self.source, self.params.get("shards.path", ""))

    @property
    def dataset(self) -> str:
        """What tells data sets apart: two folders may have one name. Of one folder a bias may have been drawn several times."""
        if self.source not in OWN_DATA:
            return self.source
        path = self.params.get("shards.path", "")
        drawn = self._shards_number("rho", 1.0) > 1 or self._shards_number("noise", 0.0) > 0
        return f"{self.data_name} {path if drawn and path else self.manifest}"

    @property
    def manifest(self) -> str:
        return self.tags.get("manifest", "")[:8]

    @property
    def seed(self) -> str:
        return self.params.get("seed", "?")

    @property
    def draw(self) -> tuple[str, str]:
        """(seed, seed of the data's bias)"""
        return self.seed, self.params.get(BIAS_SEED, "?")

    @property
    def data_variant(self) -> tuple[str, float, float]:
        """(dataset, rho, noise): runs that share it can be compared."""
        return self.dataset, self._shards_number("rho", 1.0), self._shards_number("noise", 0.0)

    def _shards_number(self, name: str, default: float) -> float:
        """As in the manifest (tag): finished shards need no such setting."""
        return _number(self.tags.get(name), _number(self.params.get(f"shards.{name}"), default))

    def number(self, key: str, default: float = math.nan) -> float:
        return _number(self.params.get(key), default)

    @cached_property
    def settings(self) -> dict[str, str]:
        """What the result depends on, besides the seed. The manifest's hash stands for all settings of the shards."""
        out = {k: v for k, v in self.params.items() if k != "seed" and effect_of(Config, k) is not Effect.NONE}
        return out | ({MANIFEST: self.manifest} if self.manifest else self.data_settings)

    @cached_property
    def settings_but_the_draw(self) -> dict[str, str]:
        """The same without the seed of the data's bias, too; of a run that does not know how its shards were built, all."""
        if not self.data_settings:
            return self.settings
        shards = {k: v for k, v in self.params.items() if k.startswith("shards.")}
        inputs = {k: v for k, v in shards.items() if effect_of(BuildConfig, k.removeprefix("shards.")) is Effect.INPUT}
        known = {**self.settings, **self.data_settings, **inputs}
        return {k: v for k, v in known.items() if k not in (MANIFEST, BIAS_SEED)}

    @cached_property
    def data_settings(self) -> dict[str, str]:
        """How the shards were built. A run that read finished shards (`shards.url`) does not know it."""
        if self.params.get("shards.url"):
            return {}
        own = {k: v for k, v in self.params.items() if k.startswith("shards.")}
        return {k: v for k, v in own.items() if effect_of(BuildConfig, k.removeprefix("shards.")) is Effect.RESULT}


def _number(text: str | None, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        return default


def read_runs(uri: str, experiments: Sequence[str]) -> list[Result]:
    """All runs of the experiments (all experiments if none is named), oldest first."""
    from pipeline.tracking.mlflow_sync import mlflow_client

    with mlflow_client(uri) as client:
        return _read_runs(client, uri, experiments)


def _read_runs(client: MlflowClient, uri: str, experiments: Sequence[str]) -> list[Result]:
    from pipeline.tracking.mlflow_sync import JOB_TAG

    known = list(client.search_experiments())
    names = {experiment.name for experiment in known}
    for name in experiments:
        if name not in names:
            listed = ", ".join(sorted(names))
            raise UserError(f"There is no experiment '{name}' at {redact(uri)}. It has {listed}.")
    wanted = [e.experiment_id for e in known if not experiments or e.name in experiments]
    out: list[Result] = []
    token: str | None = None
    while True:
        page = client.search_runs(wanted, "", order_by=["attributes.start_time ASC"], page_token=token)
        for run in page:
            if {JOB_TAG, "method"} <= run.data.tags.keys():  # not the parent of a sweep, nor another project's run
                out.append(_result(client, run))
        token = page.token
        if not token:
            return out


def _result(client: MlflowClient, run: Run) -> Result:
    info, data = run.info, run.data
    metrics, tags = with_old_names(data.metrics), dict(data.tags)
    params = upgrade_params(data.params)
    plots = _figure_data(client, run)
    return Result(info.run_id, info.run_name or "", info.status, params, metrics, tags, plots, info.experiment_id)


def _figure_data(client: MlflowClient, run: Run) -> dict[str, Any]:
    import tempfile

    from mlflow import MlflowException

    if run.info.status != "FINISHED":
        return {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = client.download_artifacts(run.info.run_id, "figures/data.json", folder)
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (MlflowException, OSError, ValueError):  # a run without figures still has metrics
            return {}
    return data if isinstance(data, dict) else {}


# -- means over seeds or draws ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean:
    """Mean and spread (sample standard deviation) of one metric over runs, with the run ids."""

    value: float
    spread: float | None
    runs: tuple[str, ...]


def mean_of(runs: Iterable[Result], metric: str) -> Mean | None:
    counted = [run for run in runs if math.isfinite(run.metrics.get(metric, math.nan))]
    if not counted:
        return None
    values = [run.metrics[metric] for run in counted]
    spread = statistics.stdev(values) if len(values) > 1 else None
    return Mean(statistics.fmean(values), spread, tuple(run.run_id for run in counted))


@dataclass(frozen=True)
class Row:
    """Runs that differ in nothing but the seed, one for each seed; or, as draws, in the seed and the bias drawn with it."""

    label: str
    method: str
    runs: tuple[Result, ...]
    repeated: tuple[Result, ...] = ()  # older runs of a seed that was run again
    apart: dict[str, str] = field(default_factory=dict)  # settings other rows of the method have otherwise
    draws: bool = False  # the bias of the data was drawn anew with every seed

    @property
    def count(self) -> str:
        return f"{len(self.runs)} draws" if self.draws else str(len(self.runs))

    @property
    def seeds(self) -> str:
        return ("draws " if self.draws else "") + ", ".join(run.seed for run in self.runs)

    @property
    def differs(self) -> str:
        return self.difference()

    def difference(self, longest: int = 0) -> str:
        """`lr=0.02 mixup=0`: what differs, without the groups of the settings; of a longer value only its end."""
        last = [key.rpartition(".")[2] for key in self.apart]
        short = {key: name if last.count(name) == 1 and name != "name" else key for key, name in zip(self.apart, last)}
        values = {key: value.removesuffix(".0") for key, value in self.apart.items()}
        cut = {key: f"…{text[-longest:]}" if longest and len(text) > longest else text for key, text in values.items()}
        return " ".join(f"{short[key]}={text}" for key, text in cut.items())


Variant = tuple[str, float, float]


def titles(compared: dict[Variant, list[Row]]) -> dict[Variant, str]:
    """What each data set is called: its name, its imbalance, the bias that was injected. Unknown noise is not named."""
    out: dict[Variant, str] = {}
    names = [rows[0].runs[0].data_name for rows in compared.values()]
    for variant, rows in compared.items():
        run, (dataset, rho, noise) = rows[0].runs[0], variant
        natural = run.source in BIASED_BY_NATURE
        words = [run.data_name if names.count(run.data_name) == 1 else dataset]
        if rho > 1 or not natural:
            words.append(f"rho={rho:g}")
        elif run.tags.get("imbalance"):
            words.append(imbalance(_number(run.tags["imbalance"], 0.0) or None))
        if noise > 0 or not natural:
            words.append(f"noise={noise:g}")
        out[variant] = ", ".join(words)
    return out


def compare(runs: Sequence[Result]) -> dict[Variant, list[Row]]:
    """Finished runs by data, then by method and settings. A label says in what a row differs from the others."""
    out: dict[Variant, list[Row]] = {}
    for run in runs:
        if run.status == "FINISHED":
            out.setdefault(run.data_variant, [])
    for variant, rows in out.items():
        here = [run for run in runs if run.data_variant == variant and run.status == "FINISHED"]
        groups = _groups(here)
        for members in groups:
            method = members[0].method
            apart = _apart(members, [others for others in groups if others[0].method == method])
            label = " ".join([method, *(f"{key}={value}" for key, value in apart.items())])
            newest = {run.seed: run for run in members}  # the list is in order of time
            repeated = tuple(run for run in members if run is not newest[run.seed])
            rows.append(Row(label, method, tuple(newest.values()), repeated, apart, _are_draws(members)))
    return out


def _groups(runs: list[Result]) -> list[list[Result]]:
    """Runs with equal settings on the same shards; groups of one draw each are one group.

    A sweep marks its draws: they are not mixed with older runs that have several seeds on one of their shards.
    """
    alike: dict[Any, list[Result]] = {}
    for run in runs:
        alike.setdefault((run.method, tuple(sorted(run.settings.items())), DRAW in run.tags), []).append(run)
    wide: dict[Any, list[list[Result]]] = {}
    for (method, _, drawn), group in alike.items():
        but_the_draw = tuple(sorted(group[0].settings_but_the_draw.items()))
        wide.setdefault((method, but_the_draw, drawn), []).append(group)
    out: list[list[Result]] = []
    for groups in wide.values():
        together = [run for run in runs if any(run in group for group in groups)]
        out += [together] if _are_draws(together) else groups
    return out


def _are_draws(runs: list[Result]) -> bool:
    """Whether seed and bias vary together: several seeds, each with a bias of its own."""
    pairs = {run.draw for run in runs}
    seeds, biases = zip(*pairs)
    return len(pairs) > 1 and len(set(seeds)) == len(set(biases)) == len(pairs)


def _apart(members: list[Result], groups: list[list[Result]]) -> dict[str, str]:
    """The settings in which these runs differ from the other groups of the same method."""
    if _are_draws(members):
        return dict(
            sorted(
                _differing(
                    members[0].settings_but_the_draw, [group[0].settings_but_the_draw for group in groups]
                ).items()
            )
        )
    apart = _differing(members[0].settings, [group[0].settings for group in groups])
    if MANIFEST in apart:  # said by the settings the shards were built with, where these are known
        built = [_first(run.data_settings for run in group) for group in groups]
        differing = _differing(_first(run.data_settings for run in members), [other for other in built if other])
        if differing:
            del apart[MANIFEST]
            apart |= differing
    return dict(sorted(apart.items()))


def _differing(own: dict[str, str], others: list[dict[str, str]]) -> dict[str, str]:
    return {key: value for key, value in own.items() if any(other.get(key) != value for other in others)}


def _first(settings: Iterable[dict[str, str]]) -> dict[str, str]:
    return next(filter(None, settings), {})


# -- the paper -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A number of the paper and our runs for it."""

    shown: str
    where: str
    paper: dict[str, float | None]
    ours: dict[str, Mean | None]
    rows: tuple[Row, ...]
    reduced: tuple[str, ...]  # how our runs differ from the paper's protocol


@dataclass(frozen=True)
class Table:
    id: str
    title: str
    notes: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]

    @property
    def run(self) -> tuple[int, int]:
        """(cells with runs, cells); a cell run with two sets of settings counts once."""
        every = {(cell.shown, cell.where) for cell in self.cells}
        return len({(cell.shown, cell.where) for cell in self.cells if cell.rows}), len(every)


def paper_tables(runs: Sequence[Result]) -> tuple[str, list[Table]]:
    """(source, tables): each cell of the paper with the finished runs that match it.

    Each set of settings has a line of its own, for example each number of epochs.
    """
    data = json.loads(PAPER.read_text(encoding="utf-8"))
    finished = [run for run in runs if run.status == "FINISHED"]
    tables = []
    for table in data["tables"]:
        cells: list[Cell] = []
        for cell in sorted(table["cells"], key=lambda c: (c["dataset"], c["noise"], c["rho"])):
            matching = [run for run in finished if _matches(run, table["id"], cell, data["standard"])]
            where = f"{cell['dataset']} rho={cell['rho']:g} noise={cell['noise']:g}"
            rows: list[Row | None] = [row for group in compare(matching).values() for row in group]
            for row in rows or [None]:
                members = row.runs if row else ()
                ours = {name: mean_of(members, metric) for name, metric in table["columns"].items()}
                reduced = _reduced(members[0], table["protocol"]) if members else ()
                cells.append(Cell(cell["shown"], where, cell["paper"], ours, (row,) if row else (), reduced))
        tables.append(Table(table["id"], table["title"], tuple(table["notes"]), tuple(table["columns"]), tuple(cells)))
    return data["source"], tables


def _matches(run: Result, table: str, cell: dict[str, Any], standard: dict[str, Any]) -> bool:
    tables = run.params.get("table_cell") or run.tags.get("table_cell") or ""
    if tables and table not in tables.replace(",", " ").split():
        return False
    if run.method != cell["method"] or run.data_variant != (
        cell["dataset"],
        float(cell["rho"]),
        float(cell["noise"]),
    ):
        return False
    if run.dataset == "webvision" and not run.params.get("shards.url") and run.params.get("shards.classes") != "50":
        return False  # the tables are about the first 50 classes
    if run.method != "prototypical":
        return True
    wanted = {**standard, **cell.get("settings", {})}
    return _ablation_switches(
        {key: run.params.get(key, value) for key, value in standard.items()}
    ) == _ablation_switches(wanted)


def _ablation_switches(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that the paper's ablations change, as comparable values."""
    plain = {key: _plain(value) for key, value in settings.items()}
    out = {key: plain[key] == _plain(off) for key, off in _OFF.items()}
    schedule = plain["method.threshold"]
    value = {"exponential": plain["method.threshold_growth"], "linear": plain["method.threshold_end"]}.get(schedule)
    out["threshold"] = ("exponential", 1.005) if schedule == "transfer" else (schedule, value)
    return out


_OFF: dict[str, Any] = {
    "method.relabel_weight": "one", "method.mixup": 0, "method.contrastive": 0, "method.cross_entropy": 0,
    "method.cleaning": False, "data.augmix": "none",
}  # fmt: skip


def _plain(value: Any) -> Any:
    """'8.0' and 8 are the same setting."""
    text = str(value)
    try:
        return float(text)
    except ValueError:
        return text


def _reduced(run: Result, protocol: dict[str, Any]) -> tuple[str, ...]:
    out = []
    for key, value in protocol.items():
        have = _plain(run.params.get(key, value))
        name = key.rpartition(".")[2]
        if have != _plain(value):
            out.append(f"{name} {have:g} of {value:g}" if isinstance(have, float) else f"{name} {have}")
    largest = {"cifar10": 5000, "cifar100": 500}.get(run.dataset)
    if largest and run.number("shards.largest", 0) not in (0, largest):
        out.append(f"largest class {run.number('shards.largest'):g} of {largest}")
    if run.params.get("method.threshold") == "transfer":
        out.append("threshold fitted to the number of epochs")
    return tuple(out)
