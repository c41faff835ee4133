"""The GPU path on a machine without GPU: every method on a fake CUDA device (tests/fake_cuda.py), in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trained import ROOT

pytestmark = pytest.mark.timeout(900)  # on a busy machine; a core of its own needs less than a minute
FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

from cases import CASES  # noqa: E402
from measure import BUDGETS, METHODS, SETUPS, differences, stage_names  # noqa: E402
from ranks import worker_env  # noqa: E402

STEPLESS = ("latent",)  # fitted when its epoch begins
# Methods that wait for the device in a step, a survey batch or an evaluation batch, and why. It should be empty.
WAITING = {"rrl": "its evaluation: nearest_neighbors breaks ties among neighbours by the rows that have them"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Errors of the cases and counts of the methods. The process is its own, because a device changes autograd for good."""
    file = tmp_path_factory.mktemp("gpu") / "found.json"
    subprocess.run([sys.executable, FOLDER / "cases.py", file], check=True, env=worker_env(), cwd=ROOT)
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, found: dict[str, Any]) -> None:
    assert name not in found["errors"], found["errors"][name]


@pytest.mark.parametrize("method", METHODS)
def test_method_costs_what_the_table_says(method: str, found: dict[str, Any]) -> None:
    lines = differences(method, json.loads(BUDGETS.read_text()).get(method, {}), found["budgets"][method])
    advice = (
        "A number that grew: see what the step does more, and lower it. A number that fell, or one that must grow:\n"
        f"    python tests/gpu/measure.py --write {method}\nwrites the table anew."
    )
    assert not lines, "\n".join([*lines, advice])


def test_table_has_the_methods_there_are() -> None:
    assert sorted(json.loads(BUDGETS.read_text())) == sorted(METHODS)


def test_no_step_survey_or_evaluation_waits_for_the_device() -> None:
    waiting = {
        method
        for method, setups in json.loads(BUDGETS.read_text()).items()
        for rows in setups.values()
        if any(row["syncs"] for row in rows.values())
    }
    assert waiting == set(WAITING)


def test_every_stage_of_every_method_is_measured() -> None:
    """A stage without a steady step would be measured by nothing."""
    for method, setups in json.loads(BUDGETS.read_text()).items():
        for setup in SETUPS:
            kinds = {batch.partition(", epoch")[0] for batch in setups[setup]}
            steps = {f"step in {name}" for name in stage_names(method)} if method not in STEPLESS else set()
            assert steps <= kinds
            assert any(kind.startswith("evaluation") for kind in kinds)
