"""The folder of a run: its name, its settings, and whether it has finished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.config import Config
from shards.base.files import output_folder
from shards.base.redact import redact
from shards.base.settings import to_yaml


def run_name(config: Config, source: str, rho: float, noise: float) -> str:
    """`digits rho=10 noise=0.5 prototypical seed=0`"""
    return f"{source} rho={rho:g} noise={noise:g} {config.method.name} seed={config.seed}"


def default_folder(config: Config) -> str:
    """A readable name below runs/. Finished shards give it their own name, because their bias is not in the settings."""
    shards = config.shards
    if shards.url:
        name = f"{Path(shards.url.rstrip('/')).name} {config.method.name} seed={config.seed}"
    else:
        name = run_name(config, shards.source, shards.rho, shards.noise)
    return "runs/" + name.replace("=", "").replace(" ", "_")


def create_run_folder(config: Config) -> Path:
    return output_folder(Path(config.output))


def write_config(config: Config, folder: Path) -> None:
    (folder / "config.yaml").write_text(redact(to_yaml(config)), encoding="utf-8")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a finished run, None before that."""
    file = folder / "summary.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
