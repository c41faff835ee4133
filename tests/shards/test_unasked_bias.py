"""A config file written for clean data does no harm to somebody's own collection."""

from __future__ import annotations

from pathlib import Path

import pytest
from shards_help import fill

from launch import kubernetes, sweep
from pipeline import config as training
from shards import build
from shards.base.errors import UserError
from shards.config import BuildConfig
from shards.reader import open_split

OWN = ["source=folder", "path=photos"]
BELOW = [f"shards.{word}" for word in OWN]  # the same, as the training takes them


@pytest.fixture
def bias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A config file of shards.build with a bias, beside a folder of photographs."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "photos", {"cat": 20, "dog": 20})
    Path("bias.yaml").write_text("rho: 4\nnoise: 0.5\n")
    return "bias.yaml"


def test_the_bias_of_a_shipped_file_is_refused_for_own_pictures() -> None:
    with pytest.raises(UserError) as refused:
        training.load(["--config", "digits", *BELOW])
    assert "rho=10 and noise=0.5 of the config file would remove pictures and falsify labels" in str(refused.value)
    assert "Leave that out with shards.rho=1 shards.noise=0," in str(refused.value)
    assert "if you mean it, write shards.rho=10 shards.noise=0.5 on the command line." in str(refused.value)


def test_what_the_sentence_says_works() -> None:
    without = training.load(["--config", "digits", *BELOW, "shards.rho=1", "shards.noise=0"]).shards
    meant = training.load(["--config", "digits", *BELOW, "shards.rho=10", "shards.noise=0.5"]).shards
    assert (without.rho, without.noise, meant.rho, meant.noise) == (1, 0, 10, 0.5)


@pytest.mark.parametrize("source", ["folder", "list", "webvision"])
def test_every_source_of_own_pictures_is_guarded_and_each_value_by_itself(source: str) -> None:
    words = ["--config", "digits", f"shards.source={source}", "shards.path=photos"]
    with pytest.raises(UserError, match=r"^noise=0.5 of the config file would falsify labels of your own collection"):
        training.load([*words, "shards.rho=10"])
    with pytest.raises(UserError, match=r"^rho=10 of the config file would remove pictures of your own collection"):
        training.load([*words, "shards.noise=0.5"])


def test_clean_data_and_finished_shards_are_as_before() -> None:
    assert training.load(["--config", "digits"]).shards.noise == 0.5
    assert training.load(["--config", "digits", *BELOW, "shards.url=shards/mine"]).shards.url == "shards/mine"
    rho = training.load(["--config", "webvision_mini", "shards.rho=50"]).shards.rho
    assert (rho, training.load(["--config", "webvision_mini"]).shards.rho) == (50, 1)


def test_a_recipe_of_the_file_does_not_ask_either(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("shards: {source: list, path: x.csv}\nrecipes: {elr: {shards: {noise: '2e-1'}}}\n")
    with pytest.raises(UserError, match=r"^noise=2e-1 of the config file would falsify labels"):
        training.load(["--config", str(file), "method.name=elr"])


def test_the_build_command_refuses_it_and_writes_nothing(bias: str) -> None:
    with pytest.raises(UserError, match="Leave that out with rho=1 noise=0, or"):
        build.main(["--config", bias, *OWN])
    assert not Path("data").exists()


def test_a_bias_that_is_asked_for_is_said_aloud_and_the_command_may_be_repeated(
    bias: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*OWN, "rho=4", "noise=0.5", "output=shards"]
    build.main(words)
    said = capsys.readouterr().out
    assert "WARNING: rho=4 leaves out 14 of your 36 training pictures on purpose." in said
    assert "WARNING: noise=0.5: 11 of your 22 labels are made wrong on purpose." in said
    build.main(words)
    assert "WARNING" not in capsys.readouterr().out
    assert len(open_split("shards")) == 22


def test_own_pictures_without_a_bias_give_no_warning(bias: str, capsys: pytest.CaptureFixture[str]) -> None:
    build.main([*OWN, "output=shards"])
    assert "WARNING" not in capsys.readouterr().out


def test_the_place_of_shards_is_what_it_was() -> None:
    """Shards that were built before are found again."""
    own = BuildConfig(source="folder", path="photos", rho=4, noise=0.5)
    assert own.place() == "data/folder-rho4-noise0.5-seed0-90818764"


def test_a_job_of_kubernetes_is_refused_before_it_starts_and_typed_words_count(
    bias: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["image=x", "task=build", "volume=v", "--", "--config", bias, *OWN, "output=/work/s"]
    with pytest.raises(UserError, match="of the config file would remove pictures"):
        kubernetes.main(job)
    kubernetes.main([*job, "rho=4", "noise=0.5"])
    assert "rho=4" in capsys.readouterr().out


def test_a_varied_setting_of_a_sweep_is_asked_for(tmp_path: Path) -> None:
    passed_on = ["--config", "digits", *BELOW, "shards.noise=0"]
    words = sweep._arguments(passed_on, {"shards.rho": "10"}, tmp_path)
    assert training.load(words).shards.rho == 10
