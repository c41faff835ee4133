"""Settings: what a person mistypes is answered at once, by name, with the way out."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import config as configuration
from pipeline.config import Config
from shards.base import cli, settings
from shards.base.errors import UserError


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests run in the checkout: commands and configs are found from there."""
    monkeypatch.chdir(Path(__file__).parents[2])


def refused(*words: str) -> str:
    with pytest.raises(UserError) as error:
        configuration.load(list(words))
    return str(error.value)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("train.epoch=3", "Did you mean 'train.epochs'?"),
        ("trian.epochs=3", "Did you mean 'train'?"),
        ("data.cache=/disk", "data.cache is a group of settings. Set one of data.cache.folder, data.cache.max_gb"),
        ("optim=fast", "optim is a group of settings. Set one of optim."),
        ("method.name=protypical", "Did you mean 'prototypical'?"),
        ("method.temprature=1", "Did you mean 'method.temperature'?"),
        ("train.epochs=three", "train.epochs: input should be a valid integer"),
        ("train.epochs=0", "train.epochs: input should be greater than 0 (got 0)"),
        ("optim.lr=-1", "optim.lr: input should be greater than 0 (got -1)"),
        ("engine=dpp", "Did you mean 'ddp'?"),
        ("checkpoint.keep=1", "checkpoint.keep: input should be greater than or equal to 2"),
        ("train.epochs", "Write it as key=value"),
        ("--epochs", "There is no option --epochs"),
        ("shards.noise=1.5", "shards.noise: input should be less than 1"),
        ("optim.accumulate=1000", "optim.accumulate cuts the batch"),
    ],
)
def test_a_mistake_is_answered_with_a_sentence(word, expected) -> None:
    assert expected in refused(word)


def test_all_mistakes_are_told_together() -> None:
    told = refused("train.epoch=3", "optim.lr=-1")
    assert "train.epoch" in told
    assert "optim.lr" in told


def test_files_are_checked_like_the_command_line(tmp_path) -> None:
    file = tmp_path / "a.yaml"
    for text, expected in [
        ("train: {epochs: 1}\ntrain: {epochs: 2}\n", "stands twice"),
        ("train: {epochs: [", "not valid YAML"),
        ("- 1\n- 2\n", "must hold `key: value` lines"),
        ("train: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
    ]:
        file.write_text(text)
        assert expected in refused("--config", str(file))
    assert "Did you mean" in refused("--config", str(tmp_path / "b.yaml"))
    file.write_bytes(b"a: 1\n" * 300_000)
    assert "larger than 1 MiB" in refused("--config", str(file))


def test_later_settings_win_and_recipes_lie_between(tmp_path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "optim: {lr: 0.3}\ntrain: {epochs: 7}\n"
        "recipes:\n"
        "  prototypical: {method: {mixup: 4}}\n"
        "  cross_entropy: {optim: {lr: 0.5, momentum: 0.8}}\n"
    )
    own = configuration.load(["--config", str(file), "method.name=cross_entropy", "optim.momentum=0.7"])
    assert (own.optim.lr, own.optim.momentum, own.train.epochs) == (0.5, 0.7, 7)
    common = configuration.load(["--config", str(file), "method.name=cross_entropy", "recipe=common"])
    assert (common.optim.lr, common.optim.momentum) == (0.3, 0.9)
    method = configuration.load(["--config", str(file), "recipe=common"]).method
    assert method.mixup == 4  # options of the method itself always count


def test_every_setting_has_a_meaning() -> None:
    missing = [key for key, kind, _, meaning in cli.walk(Config) if kind and not meaning and not key.endswith("name")]
    assert missing == []


def test_what_is_printed_can_be_read_back(tmp_path) -> None:
    config = configuration.load(["train.epochs=3", "optim.lr=1e-3"])
    file = tmp_path / "c.yaml"
    file.write_text(settings.to_yaml(config))
    assert configuration.load(["--config", str(file)]) == config
    assert config.optim.lr == 1e-3


COMMANDS = ["pipeline." + name for name in ("train", "evaluate", "audit", "predict", "report", "tracking")]
COMMANDS += ["shards.build", "shards.verify", "shards.inspect", "launch.entry", "launch.sweep"]


@pytest.mark.parametrize("module", COMMANDS)
def test_every_command_answers_help_without_torch(module: str) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['{module}', '--help']\n"
        f"try: runpy.run_module('{module}', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'mlflow', 'ffcv'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_help_and_errors_need_no_torch() -> None:
    code = "import sys; from pipeline import train, config; config.load(['train.epochs=2']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "pipeline.train", "train.epoch=3"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert time.monotonic() - start < 20  # bounds a hang; the usual time is a third of a second
    shown = subprocess.run([sys.executable, "-m", "pipeline.train", "--help"], capture_output=True, text=True).stdout
    assert "train.epochs (int, default 50)" in shown
    assert "method.name=prototypical" in shown


@pytest.mark.parametrize("name", ["digits", "cifar10_lt", "cifar100_lt", "webvision_mini"])
@pytest.mark.parametrize("recipe", ["own", "common"])
def test_every_method_has_a_valid_recipe_in_every_config(name, recipe) -> None:
    from typing import get_args

    from pipeline.methods.options import MethodOptions

    for options in get_args(get_args(MethodOptions)[0]):
        method = options.model_fields["name"].default
        config = configuration.load([f"--config=configs/{name}.yaml", f"method.name={method}", f"recipe={recipe}"])
        assert config.method.name == method
