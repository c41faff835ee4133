"""The folder of a run: its name, its settings, and whether it has finished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.tracking.tracker import DRAW, VARIED
from shards.base.files import output_folder
from shards.base.redact import redact
from shards.base.settings import to_yaml
from shards.names import OWN_DATA, name_of_source


def run_name(config: Config, dataset: str, bias: str = "") -> str:
    """`prototypical seed=0 · digits rho=10 noise=0.5`: what differs between runs comes first."""
    tags = config.tracking.tags
    drawn = f"draw={tags[DRAW]}" if DRAW in tags else f"seed={config.seed}"
    words = [config.method.name, tags.get(VARIED, ""), drawn]
    return f"{' '.join(filter(None, words))} · {dataset}{bias}"


def default_folder(config: Config) -> str:
    """A readable name below runs/. Finished shards and own pictures give it their own name."""
    shards = config.shards
    if shards.url:
        name = f"{Path(shards.url.rstrip('/')).name} {config.method.name} seed={config.seed}"
    else:
        of_data = f"{shards.source} rho={shards.rho:g} noise={shards.noise:g}"
        if shards.source in OWN_DATA:
            of_data = name_of_source(shards.source, shards.path)
        name = f"{of_data} {config.method.name} seed={config.seed}"
    return "runs/" + name.replace("=", "").replace(" ", "_")


def create_run_folder(config: Config) -> Path:
    return output_folder(Path(config.output))


def write_config(config: Config, folder: Path) -> None:
    (folder / "config.yaml").write_text(redact(to_yaml(config)), encoding="utf-8")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run, None before that."""
    file = folder / "summary.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
