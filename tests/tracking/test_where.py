"""Where runs go and how to see them: command line, config file, environment, default; the line that opens the UI."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from launch import kubernetes
from pipeline import config as configuration
from pipeline import report
from pipeline.config import TrackingConfig
from pipeline.tracking import ui
from pipeline.tracking.__main__ import _uri_of
from pipeline.tracking.tracker import DEFAULT_URI, tracking_uri
from shards.base.errors import UserError

URI, NAME = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(URI, "http://environment:5000")
    monkeypatch.setenv(NAME, "environment")


def taken(*words: str) -> tuple[str, str]:
    tracking = configuration.load(list(words)).tracking
    return tracking.uri, tracking.experiment


def test_typed_before_file_before_environment_before_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("tracking: {uri: http://file:5000}\n")
    from_file = ["--config", str(file)]
    assert taken(*from_file, "tracking.uri=http://typed:5000", "tracking.experiment=typed") == (
        "http://typed:5000",
        "typed",
    )
    assert taken(*from_file) == ("http://file:5000", "environment")  # the file is silent about the experiment
    assert taken() == ("http://environment:5000", "environment")
    assert taken("tracking.uri=")[0] == ""  # journal only, whatever the environment says
    monkeypatch.setenv(URI, "")
    monkeypatch.delenv(NAME)
    assert taken() == (DEFAULT_URI, "evenhand")


def test_the_other_commands_ask_the_same_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracking_uri() == "http://environment:5000"
    assert tracking_uri("http://typed") == "http://typed"
    assert tracking_uri("", "http://of-the-run") == "http://of-the-run"
    (tmp_path / "config.yaml").write_text("tracking: {uri: 'http://***@hidden'}\n")
    assert _uri_of(tmp_path) == "http://environment:5000"
    (tmp_path / "config.yaml").write_text("tracking: {uri: 'http://of-the-run'}\n")
    assert _uri_of(tmp_path) == "http://of-the-run"
    monkeypatch.delenv(URI)
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(UserError, match="names no MLflow server"):
        _uri_of(tmp_path)


@pytest.mark.parametrize(
    ("words", "experiments"), [([], ["environment"]), (["experiment=a,b"], ["a", "b"]), (["experiment="], [])]
)
def test_a_report_is_about_the_experiment_of_the_environment(
    words: list[str], experiments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def stop(*what: object) -> None:
        asked.extend(what)
        raise UserError("enough")

    monkeypatch.setattr("pipeline.reports.report.write_report", stop)
    with pytest.raises(UserError, match="enough"):
        report.main(words)
    assert asked[:2] == ["http://environment:5000", experiments]


def test_a_job_of_kubernetes_takes_the_environment_along(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["name=job", "image=image", "--", "shards.url=s3://bucket/c10", "checkpoint.url=s3://bucket/run"]
    kubernetes.main([*job, "tracking.experiment=typed"])
    text = yaml.safe_dump_all(yaml.safe_load_all(capsys.readouterr().out))
    assert "tracking.uri=http://environment:5000" in text
    assert "tracking.experiment=typed" in text
    assert "tracking.experiment=environment" not in text


def test_the_log_says_where_a_run_goes_without_its_password() -> None:
    line = ui.where_tracked(TrackingConfig(uri="http://me:hunter2@host:5000", experiment="flowers"))
    assert line == "MLflow: experiment flowers at http://***@host:5000"
    assert "journal" in ui.where_tracked(TrackingConfig(uri=""))


def test_the_line_leads_to_the_runs_of_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ui.ui_line_of_id("http://host:5000/", "7") == "http://host:5000/#/experiments/7/runs"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mlflow").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    line = ui.ui_line_of_id("sqlite:///a b.db", "7")
    assert (
        line
        == "bin/mlflow ui --backend-store-uri 'sqlite:///a b.db'   then open http://127.0.0.1:5000/#/experiments/7/runs"
    )
    monkeypatch.chdir(tmp_path / "bin")
    assert ui.ui_line_of_id("sqlite:///a.db", "").startswith(f"{tmp_path}/bin/mlflow ui ")


@pytest.mark.parametrize("before", [None, "http://environment:5000"])
def test_reading_runs_leaves_the_environment_as_it_was(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlflow itself writes the server into it, and the next command of this process would go there."""
    from pipeline.tracking.mlflow_sync import create_client, mlflow_client

    monkeypatch.delenv(URI)
    if before:
        monkeypatch.setenv(URI, before)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    create_client(uri)
    with mlflow_client(uri) as client:
        assert client.search_experiments()
    assert os.environ.get(URI) == before
