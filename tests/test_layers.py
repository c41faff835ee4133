"""Dependencies point one way: a package imports only from the layers below it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
# From the ground up. Packages of one line are on the same level and do not import each other.
LAYERS = (
    ("shards.base",),
    ("shards.config",),
    ("shards",),
    ("pipeline.methods.options",),
    ("pipeline.config",),
    ("pipeline.distributed", "pipeline.process"),
    ("pipeline.data", "pipeline.models"),
    ("pipeline.features",),
    ("pipeline.methods",),
    ("pipeline.engines", "pipeline.evaluation", "pipeline.checkpoints", "pipeline.tracking"),
    ("pipeline.inference",),
    ("pipeline.reports",),
    ("pipeline.training",),
    ("pipeline",),  # the commands
    ("launch",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def room(module: str) -> str:
    """The longest known prefix of a module's name."""
    parts = module.split(".")
    return next(name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in LEVEL)


def modules() -> dict[str, Path]:
    files = [path for package in ("shards", "pipeline", "launch") for path in (ROOT / package).rglob("*.py")]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


def imports(path: Path, known: set[str]) -> set[str]:
    """Modules of ours that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {next((n for n in (name, name.rpartition(".")[0]) if n in known), "") for name in found} - {""}


def test_packages_import_only_from_below() -> None:
    every = modules()
    wrong = []
    for name, path in every.items():
        for other in imports(path, set(every)):
            here, there = room(name), room(other)
            if LEVEL[there] > LEVEL[here] or (LEVEL[there] == LEVEL[here] and here != there):
                wrong.append(f"{name} imports {other}")
    assert wrong == []


def test_every_package_says_what_lives_there() -> None:
    silent = [str(path) for path in modules().values() if path.name == "__init__.py" and not path.read_text().strip()]
    assert silent == []


def test_the_flat_level_of_pipeline_holds_commands_only() -> None:
    flat = {path.stem for path in (ROOT / "pipeline").glob("*.py")} - {"__init__"}
    assert flat == {"train", "evaluate", "predict", "audit", "report", "embed", "config", "exported"}
