"""Shared by all tests: digits shards built once, and a skip that counts as a failure where it must."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

from pipeline.process.amx import avoid_broken_amx

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
for _name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):  # tests say themselves where runs go
    os.environ.pop(_name, None)
avoid_broken_amx()  # tests that use half precision in this process do not begin with apply_torch_settings
# The same examples every time: a gate says what changed, it does not explore. HYPOTHESIS=random does.
hypothesis.settings.register_profile("gate", derandomize=True)
hypothesis.settings.register_profile("random")
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS", "gate"))


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Finished digits shards, rho=10, noise=0.5."""
    from shards.build import ensure
    from shards.config import BuildConfig

    return ensure(BuildConfig(output=str(tmp_path_factory.mktemp("shards") / "digits")))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> object:
    """Under CI a skipped test is a failed test: everything a test needs can be had there."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under CI: {report.longrepr}"
    return None
