"""The wheel works alone, in an empty environment; what is imported is declared, and what is declared is imported."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipeline", "shards", "launch")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a package is built from. Building writes into its folder."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    line = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*line, "-w", out, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = out.glob("evenhand-*.whl")
    return file


def test_configs_templates_and_tables_are_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {f"pipeline/configs/{file.name}" for file in (ROOT / "configs").glob("*.yaml")}
    wanted |= {f"pipeline/reports/templates/{file.name}" for file in (ROOT / "pipeline/reports/templates").iterdir()}
    wanted |= {"pipeline/reports/paper_tables.json"}
    assert len(wanted) >= 7
    assert wanted - names == set()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)
    assert any(name.endswith("/LICENSE") for name in names)


@pytest.mark.timeout(600)
def test_a_fresh_installation_trains_and_reports_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    # Packages of this environment, but not its .pth files: our own source tree is not seen.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    work = tmp_path / "work"
    work.mkdir()
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env |= {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}

    def evenhand(*words: str) -> str:
        line = [tmp_path / "env" / "bin" / "evenhand", *words]
        done = subprocess.run(line, capture_output=True, text=True, cwd=work, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = subprocess.run(
        [python, "-c", "import pipeline; print(pipeline.__file__)"], capture_output=True, text=True, cwd=work, env=env
    )
    assert where.stdout.strip() == str(site / "pipeline" / "__init__.py")
    quick = ["method.name=cross_entropy", "train.epochs=1", "model.width=4", "data.batch=128", "output=run"]
    evenhand("train", "--config", "digits", *quick, "tracking.uri=sqlite:///mlflow.db", "tracking.experiment=first")
    assert json.loads((work / "run" / "summary.json").read_text())["last"] > 0
    assert "cross_entropy" in evenhand("report", "uri=sqlite:///mlflow.db", "experiment=first", "out=report")
    assert (work / "report" / "report.html").is_file()


def deptry(folder: Path) -> list[str]:
    """What `make lint` says of the dependencies, one line per problem."""
    tool = Path(sys.executable).parent / "deptry"
    done = subprocess.run([tool, "--no-ansi", *PACKAGES], capture_output=True, text=True, cwd=folder)
    problems = [line for line in done.stderr.splitlines() if " DEP" in line]
    assert (done.returncode != 0) == bool(problems), done.stderr
    return problems


def add_import(folder: Path) -> None:
    (folder / "launch" / "extra.py").write_text("import requests\nimport surely_nowhere\n")


def add_dependency(folder: Path) -> None:
    file = folder / "pyproject.toml"
    file.write_text(file.read_text().replace("dependencies = [\n", 'dependencies = [\n    "einops",\n', 1))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (add_import, ["DEP003 'requests'", "DEP001 'surely_nowhere'"]),
        (add_dependency, ["DEP002 'einops'"]),
    ],
)
def test_lint_refuses_undeclared_imports_and_unused_dependencies(
    source: Path, tmp_path: Path, change: Callable[[Path], None], expected: list[str]
) -> None:
    folder = tmp_path / "project"
    shutil.copytree(source, folder, symlinks=True)
    before = deptry(folder)
    change(folder)
    new = [line for line in deptry(folder) if line not in before]
    assert len(new) == len(expected)
    assert all(any(word in line for line in new) for word in expected), new


def package_name(requirement: str) -> str:
    return re.split(r"[\[=<>]", requirement)[0].lower().replace("_", "-")


def test_every_declared_package_has_a_version_in_the_constraints() -> None:
    """A new set-up gets the versions that were tested."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for group in project["optional-dependencies"].values() for name in group]
    declared = {package_name(line) for line in [*project["dependencies"], *extras]}
    pinned = {package_name(line) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert declared - pinned == set()
    assert "torchmetrics" not in declared | pinned


def test_the_citation_is_valid_yaml_and_of_this_version() -> None:
    import tomllib

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert "2110.11553" in json.dumps(citation["references"])
