"""A trained model on shards and on loose pictures, from wherever it is kept, always with the same answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow_store import client_of
from ranks import free_port, on_ranks, worker_env
from trained import ROOT, Trained, command, train

from pipeline.data.loader import Loader
from pipeline.distributed.world import World
from pipeline.inference.open_run import open_run
from shards.base.errors import UserError
from shards.build import ensure
from shards.config import BuildConfig
from shards.reader import open_split

pytest_plugins = ["mlflow_fixtures"]


@pytest.fixture(scope="module")
def pictures(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight test pictures as files, and one that is none."""
    folder = tmp_path_factory.mktemp("pictures")
    split = open_split(trained.shards, "test")
    for index in range(8):
        (folder / f"{index}.png").write_bytes(bytes(split.read(index)))
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff not a picture")
    return folder


def scores_of(run: str, uri: str, pictures: Path) -> np.ndarray:
    model = open_run(run, uri).model
    return np.stack([a.scores for a in model.predict(p.read_bytes() for p in sorted(pictures.glob("*.png")))])


def test_folder_checkpoint_run_id_and_mlflow_model_give_the_same_scores_bit_for_bit(
    trained: Trained, pictures: Path
) -> None:
    newest = max((trained.folder / "checkpoints").iterdir())
    places = [str(trained.folder), str(newest), str(trained.folder / "model"), trained.run_id,
              f"runs:/{trained.run_id}/model", "models:/digits/1"]  # fmt: skip
    found = [scores_of(place, trained.uri, pictures) for place in places]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
    assert found[0].sum(1) == pytest.approx(1.0)


def test_the_mlflow_model_in_a_fresh_process_gives_the_checkpoints_scores_bit_for_bit(
    trained: Trained, pictures: Path, tmp_path: Path
) -> None:
    """Outside the source tree: the package is installed, and nothing else is needed."""
    script = f"""
import io, pathlib, mlflow, numpy, pandas, PIL.Image
mlflow.set_tracking_uri({trained.uri!r})
model = mlflow.pyfunc.load_model("runs:/{trained.run_id}/model")
files = [p.read_bytes() for p in sorted(pathlib.Path({str(pictures)!r}).glob("*.png"))]
answers = model.predict(pandas.DataFrame({{"image": [*files, b"junk"]}}))
assert answers["problem"].tolist()[-1] and answers["class"].tolist()[-1] == -1
arrays = [numpy.array(PIL.Image.open(io.BytesIO(f)).convert("RGB")) for f in files]
same = model.predict(pandas.DataFrame({{"image": arrays}}))
assert same["scores"].tolist() == answers["scores"].tolist()[:-1]
assert model.metadata.signature is not None and model.input_example is not None
numpy.save({str(pictures / "scores.npy")!r}, numpy.array(answers["scores"].tolist()[:-1], numpy.float32))
"""
    outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(pictures / "scores.npy"), scores_of(str(trained.folder), "", pictures))


def test_predict_streams_lines_and_reports_a_picture_that_cannot_be_read(trained: Trained, pictures: Path) -> None:
    done = command("pipeline.predict", trained.folder, pictures, "jsonl=true", "top=3")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [Path(answer["path"]).name for answer in answers] == [f"{k}.png" for k in range(8)]
    assert all(len(answer["top"]) == 3 and answer["label"] == answer["top"][0]["label"] for answer in answers)
    assert "skipped" in done.stderr
    assert "broken.jpg" in done.stderr
    assert "8 answered, 1 skipped" in done.stderr


def test_predict_says_what_is_wrong_before_it_loads_anything(pictures: Path) -> None:
    done = command("pipeline.predict", "run", pictures / "0.png", "nowhere.png", ok=False)
    assert done.returncode == 2
    assert "There is no file nowhere.png" in done.stderr


def test_answers_go_to_a_file_where_one_can_be(trained: Trained, pictures: Path, tmp_path: Path) -> None:
    model = trained.folder / "model"
    command("pipeline.predict", model, pictures / "0.png", f"out={tmp_path}/new/answers.tsv")
    assert (tmp_path / "new" / "answers.tsv").read_text().startswith(str(pictures / "0.png"))
    done = command("pipeline.predict", model, pictures / "0.png", f"out={tmp_path}/new", ok=False)
    assert (done.returncode, "cannot be written" in done.stderr) == (2, True)


def test_evaluate_gives_the_accuracy_the_run_ended_with(trained: Trained, tmp_path: Path) -> None:
    said = command("pipeline.evaluate", trained.folder, f"out={tmp_path}").stdout
    pictures, samples = (trained.summary[key] for key in ("few_test_pictures", "few_training_samples"))
    assert f"({pictures} pictures, {samples} training samples)" in " ".join(said.split())
    metrics = json.loads((tmp_path / "evaluation.json").read_text())["metrics"]["test"]
    assert metrics["test/top1"] == trained.summary["last"]
    assert metrics["test/many"] == trained.summary["many"]
    assert len((tmp_path / "classes-test.csv").read_text().splitlines()) == 11


def test_evaluate_on_two_ranks_says_what_one_says(trained: Trained, tmp_path: Path) -> None:
    ranks = ["--standalone", "--nproc_per_node=2", "-m", "pipeline.evaluate"]
    out = command("torch.distributed.run", *ranks, trained.folder, f"out={tmp_path}/two")
    assert out.stdout.count("wrote") == 1
    command("pipeline.evaluate", trained.folder, f"out={tmp_path}/one")
    one, two = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("one", "two"))
    assert two["metrics"]["test"] == pytest.approx(one["metrics"]["test"], rel=1e-5)
    classes = [(tmp_path / name / "classes-test.csv").read_bytes() for name in ("one", "two")]
    assert classes[0] == classes[1]


def evaluate_on_two_ranks(folders: list[Path], *words: object) -> list[tuple[int, str]]:
    """(exit code, standard error) of `pipeline.evaluate` on ranks that run in different folders, as on two machines."""
    port = str(free_port())
    started = []
    for rank, folder in enumerate(folders):
        ranks = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        env = worker_env() | ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
        line = [sys.executable, "-m", "pipeline.evaluate", *map(str, words)]
        started.append(subprocess.Popen(line, cwd=folder, env=env, stderr=subprocess.PIPE, text=True))
    return [(process.wait(timeout=200), process.communicate()[1]) for process in started]


@pytest.mark.dist
def test_an_error_that_only_another_rank_meets_is_told_once(trained: Trained, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        shutil.copytree(trained.shards, folder / "shards")
    (first / "run").symlink_to(trained.folder)
    (code, told), (other_code, other_told) = evaluate_on_two_ranks([first, second], "run")
    assert (code, other_code, other_told) == (2, 2, "")
    assert told == "error: rank 1: There is no run 'run': it is no folder, no URL and no MLflow run id.\n"
    # A damaged copy of the shards on one machine.
    for tar in (second / "shards").glob("test-*.tar"):
        tar.write_bytes(tar.read_bytes()[:-2000])
    (code, told), (other_code, other_told) = evaluate_on_two_ranks([first, second], trained.folder, "shards=shards")
    assert (code, other_code, other_told) == (2, 2, "")
    assert told.startswith("error: rank 1: ")
    assert told.count(".tar") == 1
    # What all of them meet is told once.
    (code, told), (other_code, other_told) = evaluate_on_two_ranks([first, second], "nothing")
    assert (code, other_code, other_told) == (2, 2, "")
    assert told == "error: There is no run 'nothing': it is no folder, no URL and no MLflow run id.\n"


def evaluate_until_shards_are_gone(world: World, run: Path, failing: list[int], batches: int) -> str:
    """The sentence every rank ends with when shards are lost on some ranks after so many batches."""
    from pipeline.evaluate import evaluate_split
    from pipeline.inference import open_run as module

    class Failing:
        def __init__(self, loader: Loader) -> None:
            self.loader = loader

        def survey(self) -> Iterator[Any]:
            yield from islice(self.loader.survey(), batches)
            raise UserError(f"shard {world.rank} is gone.")

    real = module.open_loader
    if world.rank in failing:
        module.open_loader = lambda *args: Failing(real(*args))  # type: ignore[assignment,return-value]
    opened = open_run(str(run))
    try:
        return f"accuracy {evaluate_split(opened, opened.split('test'), world).metrics['test/top1']}"
    except UserError as error:
        return str(error)
    finally:
        module.open_loader = real


@pytest.mark.dist
@pytest.mark.parametrize(
    ("failing", "batches", "expected"),
    [
        ([1], 1, "rank 1: shard 1 is gone."),
        ([0], 0, "rank 0: shard 0 is gone."),
        ([0, 1], 0, "rank 0: shard 0 is gone.\nrank 1: shard 1 is gone."),
    ],
)
def test_an_error_in_the_middle_of_an_evaluation_reaches_every_rank(
    trained: Trained, failing: list[int], batches: int, expected: str
) -> None:
    told = on_ranks(2, evaluate_until_shards_are_gone, trained.folder, failing, batches)
    assert told == [expected, expected]


def test_groups_are_those_of_the_models_own_training_set_on_any_shards(trained: Trained, tmp_path: Path) -> None:
    """Here every class has more than 100 pictures."""
    from pipeline.evaluate import evaluate_split

    other = ensure(BuildConfig(rho=1, noise=0, output=str(tmp_path / "even")))
    own = [trained.summary[group] for group in ("many", "medium", "few")]
    for place in (trained.folder, trained.folder / "model"):
        opened = open_run(str(place))
        metrics = evaluate_split(opened, opened.split("test", other), World()).metrics
        assert [metrics[f"test/{group}"] for group in ("many", "medium", "few")] == own


def test_a_run_id_finds_its_own_checkpoints_and_never_those_of_another_run_at_the_same_path(
    trained: Trained, database: Path, tmp_path: Path
) -> None:
    client = client_of(database)
    experiment = client.create_experiment("other", (tmp_path / "artifacts").as_uri())
    tags = {"evenhand.job": "another job"}
    run_id = client.create_run(experiment, tags=tags).info.run_id
    client.log_param(run_id, "output", str(trained.folder))
    with pytest.raises(UserError, match=f"model runs:/{run_id}/model cannot be fetched"):
        open_run(run_id, f"sqlite:///{database}")
    with pytest.raises(UserError, match=r"checkpoints of run .* are not here"):
        open_run(run_id, f"sqlite:///{database}", best=True)
    opened = open_run(trained.run_id, trained.uri)
    assert opened.position is not None
    assert open_run("models:/digits/1", trained.uri).run_id == trained.run_id


def test_a_short_run_knows_its_id_by_its_summary(trained: Trained, tmp_path: Path) -> None:
    train(trained.shards, f"output={tmp_path / 'run'}", "tracking.uri=")  # no id in any checkpoint
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert open_run(str(newest)).run_id == ""
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary | {"run_id": "f" * 32}))
    for place in (tmp_path / "run", tmp_path / "run" / "checkpoints", newest):
        assert open_run(str(place)).run_id == "f" * 32


def test_a_server_that_is_not_there_is_told_and_no_database_is_made(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"127.0.0.1:9: no answer \(Connection refused\)"):
        open_run(trained.run_id, "http://127.0.0.1:9")
    for run in (trained.run_id, "models:/digits/1"):
        with pytest.raises(UserError, match="no MLflow database"):
            open_run(run, f"sqlite:///{tmp_path / 'none.db'}")
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_in_a_bucket_without_credentials_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UserError, match=r"s3://bucket/run may not be read or written: .* Check the credentials"):
        open_run("s3://bucket/run")


def test_one_model_has_no_best_checkpoint_and_moved_shards_are_asked_for(trained: Trained, tmp_path: Path) -> None:
    for one in ("models:/digits/1", str(trained.folder / "model")):
        with pytest.raises(UserError, match="best=true chooses among checkpoints"):
            open_run(one, trained.uri, best=True)
    opened = open_run(str(trained.folder / "model"))
    opened.shards = str(tmp_path / "gone")
    with pytest.raises(UserError, match=r"no finished shards at .*; if they are elsewhere now, add shards="):
        opened.split("test")


def test_a_run_that_is_nowhere_and_classes_that_do_not_fit_are_refused(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no run 'nothing'"):
        open_run("nothing")
    with pytest.raises(UserError, match="no run"):
        open_run("0" * 32, trained.uri)
    opened = open_run(str(trained.folder / "model"))
    opened.model.classes = ["cat", "dog"]
    with pytest.raises(UserError, match="other classes"):
        opened.split("test", trained.shards)
