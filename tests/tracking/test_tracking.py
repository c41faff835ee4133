"""Tracking without a server: the journal, restarts, secrets, and a local MLflow database."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow_store import client_of, history, runs_in
from trained import Trained, train

from pipeline.config import TrackingConfig
from pipeline.tracking import tracker as tracking
from pipeline.tracking.__main__ import replay
from pipeline.tracking.journal import Journal, lock
from pipeline.tracking.tracker import NullTracker, Tracker, journal, start_tracker
from shards.base.errors import UserError
from shards.base.redact import redact

pytest_plugins = ["mlflow_fixtures"]
PARAMS: dict[str, object] = {"method.name": "prototypical", "train.epochs": 3}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "SYNC_SECONDS", 0.1)


def config(database: Path | None = None, **more: object) -> TrackingConfig:
    uri = f"sqlite:///{database}" if database else ""
    return TrackingConfig.model_validate({"uri": uri, "system_metrics": False, **more})


def start(config: TrackingConfig, folder: Path, state: dict | None = None, **params: object) -> Tracker:
    return start_tracker(
        config, folder, "digits prototypical seed=0", {**PARAMS, **params}, {"method": "prototypical"}, state
    )


def stop(tracker: Tracker) -> None:
    """As if its process had died without a word: the threads end, no end is written."""
    tracker._closing.set()
    tracker._wake.set()
    for thread in tracker._threads:
        thread.join()


def wait_for_lock(folder: Path) -> None:
    free = True
    while free:
        with lock(folder / "journal.jsonl") as free:
            pass


def lines(folder: Path, kind: str = "metrics") -> list[dict]:
    return [record for _, record in journal.read(folder / "journal.jsonl") if record["kind"] == kind]


# -- the journal -------------------------------------------------------------------------------------


def test_without_a_uri_there_is_only_the_journal_and_mlflow_is_never_imported(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from pipeline.tracking.tracker import start_tracker\n"
        "from pipeline.config import TrackingConfig\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "t = start_tracker(TrackingConfig(uri='', system_metrics=False), folder, 'run', {}, {})\n"
        "t.log(1, {'test/top1': 50.0}); assert t.finish('FINISHED'); assert t.run_id is None\n"
        "assert 'mlflow' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert lines(tmp_path)[0]["values"] == {"test/top1": 50.0}


def test_other_ranks_have_the_same_calls_without_effect(tmp_path: Path) -> None:
    tracker = NullTracker()
    tracker.log(0, {"a": 1.0})
    tracker.artifact(tmp_path)
    tracker.dataset({})
    tracker.model(tmp_path)
    assert tracker.state() == {}
    assert tracker.finish("FINISHED")
    assert tracker.run_id is None
    assert list(tmp_path.iterdir()) == []


def test_half_a_line_left_by_a_killed_process_disappears_and_the_next_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"kind":"metrics","step":1}\n{"kind":"met')
    book = Journal(path)
    book.append({"kind": "metrics", "step": 2})
    book.close()
    assert [record["step"] for _, record in journal.read(path)] == [1, 2]


def test_a_full_disk_neither_raises_nor_loses_a_line(tmp_path: Path) -> None:
    book = Journal(tmp_path / "journal.jsonl")
    book.append({"step": 0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (book.size + 5, limits[1]))
    try:
        book.append({"step": 1})
        book.append({"step": 2})
        assert [record["step"] for _, record in journal.read(book.path)] == [0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    book.append({"step": 3})
    book.close()
    assert [record["step"] for _, record in journal.read(book.path)] == [0, 1, 2, 3]


def test_values_that_are_no_numbers_survive_the_journal(tmp_path: Path) -> None:
    tracker = start(config(), tmp_path)
    tracker.log(1, {"loss/total": float("nan"), "train/lr": float("inf")})
    tracker.finish("FINISHED")
    values = lines(tmp_path)[0]["values"]
    assert values["loss/total"] != values["loss/total"]
    assert values["train/lr"] == float("inf")


# -- one job, one run --------------------------------------------------------------------------------


def test_a_resumed_job_goes_on_in_the_same_run_and_no_step_is_there_twice(database: Path, tmp_path: Path) -> None:
    first = start(config(database), tmp_path / "run")
    for epoch in (1, 2):
        first.log(epoch, {"test/top1": 10.0 * epoch})
    state = first.state()
    first.log(3, {"test/top1": 30.0})  # after the checkpoint: it will be done again
    assert first.finish("KILLED")
    assert runs_in(database)[0].info.status == "KILLED"

    state = json.loads(json.dumps(state))  # as a checkpoint keeps it
    second = start(config(database), tmp_path / "run", state, **{"train.epochs": 4})
    assert [record["step"] for record in lines(tmp_path / "run")] == [1, 2]
    for epoch in (3, 4):
        second.log(epoch, {"test/top1": 10.0 * epoch})
    assert second.finish("FINISHED")

    (run,) = runs_in(database)
    assert run.info.run_id == second.run_id == first.run_id
    assert run.info.status == "FINISHED"
    assert history(database, run.info.run_id, "test/top1") == [(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0)]
    assert run.data.params["train.epochs"] == "3"
    assert run.data.tags["resumed_with.train.epochs"] == "4"


def test_a_job_that_died_before_its_first_checkpoint_starts_again_in_the_same_run(
    database: Path, tmp_path: Path
) -> None:
    first = start(config(database), tmp_path / "run")
    first.log(1, {"test/top1": 10.0})
    stop(first)
    second = start(config(database), tmp_path / "run")
    second.log(1, {"test/top1": 10.0})
    second.log(2, {"test/top1": 20.0})
    assert second.finish("FINISHED")
    (run,) = runs_in(database)
    assert history(database, run.info.run_id, "test/top1") == [(1, 10.0), (2, 20.0)]


def test_another_training_in_the_same_folder_is_another_run_and_the_old_journal_is_kept(
    tmp_path: Path,
) -> None:
    first = start(config(), tmp_path)
    first.log(1, {"test/top1": 10.0})
    first.finish("FINISHED")
    second = start(config(), tmp_path, **{"method.name": "cross_entropy"})
    assert second.state()["job"] != first.state()["job"]
    assert lines(tmp_path) == []
    aside = list(tmp_path.glob("journal-*.jsonl"))
    assert len(aside) == 1
    assert '"test/top1":10.0' in aside[0].read_text()


def test_replay_ships_what_a_dead_job_left_marks_it_failed_and_does_nothing_the_second_time(
    database: Path, tmp_path: Path
) -> None:
    dead = start(config(), tmp_path / "run")  # journal only: as if the server had been away all the time
    dead.log(1, {"test/top1": 10.0})
    stop(dead)
    uri = f"sqlite:///{database}"
    assert replay(tmp_path / "run", uri) == 3  # start, metrics, end
    (run,) = runs_in(database)
    assert run.info.status == "FAILED"
    assert run.info.run_name == "digits prototypical seed=0"
    assert replay(tmp_path / "run", uri) == 0
    assert history(database, run.info.run_id, "test/top1") == [(1, 10.0)]


def test_replay_keeps_away_from_a_journal_whose_job_is_alive(database: Path, tmp_path: Path) -> None:
    alive = start(config(database), tmp_path / "run")
    while not alive.run_id:
        pass
    with pytest.raises(UserError, match="still running, or another replay"):
        replay(tmp_path / "run", f"sqlite:///{database}")
    alive.finish("FINISHED")


def test_replay_keeps_away_from_a_job_that_only_writes_its_journal(database: Path, tmp_path: Path) -> None:
    alive = start(config(), tmp_path / "run")
    alive.log(1, {"test/top1": 10.0})
    wait_for_lock(tmp_path / "run")
    with pytest.raises(UserError, match="still running"):
        replay(tmp_path / "run", f"sqlite:///{database}")
    alive.log(2, {"test/top1": 20.0})
    alive.finish("FINISHED")
    assert replay(tmp_path / "run", f"sqlite:///{database}") == 4
    (run,) = runs_in(database)
    assert run.info.status == "FINISHED"
    assert history(database, run.info.run_id, "test/top1") == [(1, 10.0), (2, 20.0)]


def test_a_job_that_starts_again_while_it_is_replayed_loses_nothing(database: Path, tmp_path: Path) -> None:
    first = start(config(database), tmp_path / "run")
    first.log(1, {"test/top1": 10.0})
    state = first.state()
    assert first.finish("KILLED")
    path = first.path
    with lock(path):  # a replay is at work when the job starts again, and notes how far it came
        second = start(config(database), tmp_path / "run", state)
        journal.write_cursor(path, {**journal.read_cursor(path), "offset": second._journal.size + 40})
        second.log(2, {"test/top1": 20.0})
    second.log(3, {"test/top1": 30.0})
    assert second.finish("FINISHED")
    (run,) = runs_in(database)
    assert history(database, run.info.run_id, "test/top1") == [(1, 10.0), (2, 20.0), (3, 30.0)]


def test_the_journal_put_aside_of_a_job_that_died_is_replayed_as_failed(database: Path, tmp_path: Path) -> None:
    dead = start(config(), tmp_path)
    stop(dead)
    other = start(config(), tmp_path, **{"method.name": "cross_entropy"})
    other.finish("FINISHED")
    (tmp_path / "summary.json").write_text('{"last": 1.0, "run_id": null}')
    replay(tmp_path, f"sqlite:///{database}")
    found = {run.data.params["method.name"]: run.info for run in runs_in(database)}
    assert {name: info.status for name, info in found.items()} == {
        "prototypical": "FAILED",
        "cross_entropy": "FINISHED",
    }
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {"last": 1.0, "run_id": found["cross_entropy"].run_id}  # never a number without its run


def test_a_journal_lost_with_its_machine_is_written_again_from_the_checkpoint(
    trained: Trained, database: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained.folder / "checkpoints", tmp_path / "checkpoints")
    words = f"output={tmp_path / 'elsewhere'}", f"checkpoint.url={tmp_path / 'checkpoints'}"
    train(trained.shards, *words, f"tracking.uri=sqlite:///{database}")
    (run,) = runs_in(database)
    known = history(trained.uri, trained.run_id, "test/top1")
    assert len(known) == 3
    assert history(database, run.info.run_id, "test/top1") == known


def test_a_second_run_of_the_same_job_made_by_a_slow_server_is_taken_away(database: Path, tmp_path: Path) -> None:
    tracker = start(config(database), tmp_path)
    tracker.log(1, {"test/top1": 10.0})
    while tracking.pending(tracker.path):
        pass
    client = client_of(database)
    (run,) = runs_in(database)
    client.create_run(run.info.experiment_id, run.info.start_time, {"evenhand.job": tracker.state()["job"]})
    tracker.log(2, {"test/top1": 20.0})
    assert tracker.finish("FINISHED")
    (left,) = runs_in(database)
    assert left.info.run_id == run.info.run_id == tracker.run_id
    assert history(database, left.info.run_id, "test/top1") == [(1, 10.0), (2, 20.0)]


def test_a_run_lost_with_its_database_is_made_again_from_the_journal(
    migrated: Path, database: Path, tmp_path: Path
) -> None:
    tracker = start(config(database), tmp_path / "run")
    tracker.log(1, {"test/top1": 10.0})
    assert tracker.finish("FINISHED")
    database.write_bytes(migrated.read_bytes())
    assert replay(tmp_path / "run", f"sqlite:///{database}") == 3  # not "nothing was left to ship"
    (run,) = runs_in(database)
    assert history(database, run.info.run_id, "test/top1") == [(1, 10.0)]


# -- what reaches MLflow -----------------------------------------------------------------------------


def test_everything_about_a_run_reaches_mlflow(database: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "figures").mkdir(parents=True)
    (folder / "figures" / "accuracy.png").write_bytes(b"png")
    (folder / "config.yaml").write_text("a: 1\n")
    tracker = start(config(database, parent="0" * 32, tags={"team": "vision", "a@b": "c"}, system_metrics=True), folder)
    tracker.artifact(folder / "config.yaml")
    tracker.artifact(folder / "figures")
    tracker.dataset({"name": "digits", "digest": "abc", "source": "data/digits", "rho": 10.0})
    tracker.log(1, {"acc@1%": 1.0, "test/top1": 50.0})
    while not any(k.startswith("system/") for record in lines(folder) for k in record["values"]):
        pass
    assert tracker.finish("FINISHED")
    (run,) = runs_in(database)
    tags = run.data.tags
    assert (tags["method"], tags["team"], tags["mlflow.parentRunId"]) == ("prototypical", "vision", "0" * 32)
    if (Path(__file__).parents[2] / ".git").exists():
        assert len(tags["mlflow.source.git.commit"]) == 40
    assert tags["a_b"] == "c"  # MLflow would refuse the name, and with it the run
    assert run.data.params["method.name"] == "prototypical"
    assert {"acc_1_", "test/top1", "system/cpu_utilization_percentage"} <= set(run.data.metrics)
    assert next(iter(run.data.metrics)) == "test/top1"  # MLflow's compare page starts with the first
    assert run.inputs.dataset_inputs[0].dataset.name == "digits"
    client = client_of(database)
    assert {item.path for item in client.list_artifacts(run.info.run_id)} == {"config.yaml", "figures"}
    assert run.info.artifact_uri.startswith((database.parent / "mlartifacts").as_uri())


def test_the_commit_is_that_of_our_code_not_of_a_repository_it_was_installed_in(tmp_path: Path) -> None:
    for words in ("init -q", "-c user.name=a -c user.email=b commit -q --allow-empty -m other"):
        subprocess.run(["git", "-C", str(tmp_path), *words.split()], check=True)
    code = tmp_path / "tracking.py"
    code.write_text("")
    assert tracking._commit(code) == {}
    for words in ("add tracking.py", "-c user.name=a -c user.email=b commit -q -m ours"):
        subprocess.run(["git", "-C", str(tmp_path), *words.split()], check=True)
    assert len(tracking._commit(code)["mlflow.source.git.commit"]) == 40


def test_an_artifact_that_cannot_be_stored_does_not_hold_up_the_metrics(database: Path, tmp_path: Path) -> None:
    blocked = database.parent / "mlartifacts"
    blocked.write_text("a file where the folder should be")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("a: 1\n")
    tracker = start(config(database), folder)
    tracker.artifact(folder / "config.yaml")
    tracker.log(1, {"test/top1": 50.0})
    assert not tracker.finish("FINISHED")
    (run,) = runs_in(database)
    assert history(database, run.info.run_id, "test/top1") == [(1, 50.0)]
    with pytest.raises(UserError, match="1 artifacts were not taken"):
        replay(folder, f"sqlite:///{database}")
    blocked.unlink()
    assert replay(folder, f"sqlite:///{database}") == 1
    assert [item.path for item in client_of(database).list_artifacts(run.info.run_id)] == ["config.yaml"]


def test_a_model_whose_upload_was_cut_off_is_there_once_after_all(
    trained: Trained, database: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained.folder / "model", tmp_path / "run" / "model")
    blocked = database.parent / "mlartifacts"
    blocked.write_text("a file where the folder should be")
    tracker = start(config(database), tmp_path / "run")
    tracker.model(tmp_path / "run" / "model")
    assert not tracker.finish("FINISHED")
    blocked.unlink()
    for _ in range(2):
        replay(tmp_path / "run", f"sqlite:///{database}")
        (run,) = runs_in(database)
        (model,) = client_of(database).search_logged_models([run.info.experiment_id])
        assert model.status == "READY"
        assert [output.model_id for output in run.outputs.model_outputs] == [model.model_id]


# -- secrets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("http://user:hunter2@mlflow.example:5000/x", "http://***@mlflow.example:5000/x"),
        ("s3://bucket/a?X-Amz-Signature=abc&x=1", "s3://bucket/a?X-Amz-Signature=***&x=1"),
        ("see https://tok@host/a and https://b:c@d", "see https://***@host/a and https://***@d"),
        ("sqlite:///runs/mlflow.db", "sqlite:///runs/mlflow.db"),
        ("mail me@example.org", "mail me@example.org"),
        ("http://user:p@ss'w@mlflow/x", "http://***@mlflow/x"),
        ("https://x.blob.core.windows.net/a?sv=1&sig=abc%3D", "https://x.blob.core.windows.net/a?sv=1&sig=***"),
        ("https://host/a?access-key=abc", "https://host/a?access-key=***"),
    ],
)
def test_urls_lose_their_secrets(text: str, clean: str) -> None:
    assert redact(text) == clean


@pytest.mark.parametrize(
    ("uri", "kept"),
    [
        ("http://user:p%40ss@host:5000/mlflow", "http://host:5000/mlflow"),
        ("postgresql://user:pass@host/mlflow", "postgresql://user:pass@host/mlflow"),  # the driver's only place
    ],
)
def test_only_a_servers_credentials_move_into_the_environment(
    uri: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.tracking import mlflow_sync

    monkeypatch.delenv("MLFLOW_TRACKING_USERNAME", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD", raising=False)
    assert mlflow_sync.without_credentials(uri) == kept
    moved = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_PASSWORD")
    assert moved == (("user", "p@ss") if uri.startswith("http") else (None, None))


def test_no_password_reaches_the_journal_or_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    uri = "http://user:hunter2@127.0.0.1:9"  # nobody answers there
    caplog.set_level(logging.DEBUG)
    tracker = start(TrackingConfig(uri=uri, system_metrics=False), tmp_path, **{"tracking.uri": uri})
    tracker.dataset({"name": "digits", "source": "https://key:hunter2@host/data"})
    tracker.log(1, {"test/top1": 1.0})
    assert not tracker.finish("FAILED", wait=15)
    assert "hunter2" not in caplog.text
    assert "Training goes on" in caplog.text
    assert "replay" in caplog.text
    for file in tmp_path.iterdir():
        assert "hunter2" not in file.read_text(), file
