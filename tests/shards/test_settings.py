"""Settings: what a person mistypes is answered at once, by name, with the way out."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import Field

from launch.completion import command_of
from launch.evenhand import COMMANDS
from pipeline import config as configuration
from shards.base import cli, settings
from shards.base.errors import UserError

HERE = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}  # tests run in an empty folder


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
        ("method.neighbors=1", "Did you mean 'method.neighbours'?"),
        ("train.epochs=three", "train.epochs: input should be a valid integer"),
        ("train.epochs=0", "train.epochs: input should be greater than 0 (got 0)"),
        ("optim.lr=-1", "optim.lr: input should be greater than 0 (got -1)"),
        ("engine=dpp", "Did you mean 'ddp'?"),
        ("checkpoint.keep=1", "checkpoint.keep: input should be greater than or equal to 2"),
        ("train.epochs", "Write it as key=value"),
        ("--epochs", "There is no option --epochs"),
        ("shards.noise=1.5", "shards.noise: input should be less than 1"),
        ("optim.accumulate=1000", "optim.accumulate cuts the batch"),
        ("optim.warmup_epochs=0.5", "round it, or set optim.schedule_by=step"),
        ("optim.betas=[0.9, 1]", "optim.betas must be below 1"),
        ("model.freeze=-1", "model.freeze: input should be greater than or equal to 0 (got -1)"),
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
    method = configuration.load(["--config", str(file), "method.name=prototypical", "recipe=common"]).method
    assert method.mixup == 4  # options of the method itself always count


def test_every_setting_has_a_meaning() -> None:
    described = [setting for name in COMMANDS for setting in cli.settings_of(command_of(name).schema)]
    missing = [s.key for s in described if s.annotation and not s.meaning and not s.key.endswith("name")]
    assert missing == []


def test_what_is_printed_can_be_read_back(tmp_path) -> None:
    config = configuration.load(["train.epochs=3", "optim.lr=1e-3"])
    file = tmp_path / "c.yaml"
    file.write_text(settings.to_yaml(config))
    assert configuration.load(["--config", str(file)]) == config
    assert config.optim.lr == 1e-3


MODULES = ["pipeline." + name for name in ("train", "evaluate", "audit", "predict", "report", "tracking")]
MODULES += ["shards.build", "shards.verify", "shards.inspect", "launch.entry", "launch.sweep", "launch.kubernetes"]


def answer(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command that must answer before it imports anything heavy."""
    code = (
        "import runpy, sys\n"
        f"sys.argv[1:] = {[*words]!r}\n"
        f"try: runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
        "finally: assert not {'torch', 'mlflow', 'ffcv'} & set(sys.modules), 'heavy'"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=HERE)


@pytest.mark.parametrize("module", MODULES)
def test_every_command_answers_help_without_torch(module: str) -> None:
    done = answer(module, "--help")
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.mark.parametrize(
    ("module", "words", "expected"),
    [
        ("pipeline.audit", ["run", "treshold=0.3"], "There is no setting 'treshold'. Did you mean 'threshold'?"),
        ("pipeline.audit", ["run", "threshold=3"], "threshold: input should be less than or equal to 1 (got 3)"),
        (
            "pipeline.audit",
            ["run", "apply=dorp"],
            "apply: 'dorp' is not one of decisions, relabel, drop, drop-outliers, drop-duplicates, drop-leaks, drop-faulty. Did you mean 'drop'?",
        ),
        ("pipeline.audit", ["run", "other"], "'other' is one word too many. Write: python -m pipeline.audit RUN"),
        ("pipeline.audit", [], "RUN is missing: output folder, checkpoint, MLflow run id or MLflow model."),
        ("pipeline.evaluate", ["run", "best=maybe"], "best: input should be a valid boolean"),
        ("pipeline.predict", ["run"], "PICTURES is missing: files, folders, or -"),
        ("pipeline.predict", ["run", "a.png", "top=0"], "top: input should be greater than 0"),
        ("pipeline.report", ["experimnt=a"], "Did you mean 'experiment'?"),
        ("pipeline.tracking", ["replay"], "FOLDER is missing: output folder of the run."),
        ("pipeline.tracking", ["rplay", "x"], "Write: python -m pipeline.tracking replay FOLDER"),
        ("launch.sweep", ["out=x", "job=2"], "Did you mean 'jobs'?"),
        # as it was written before
        ("pipeline.audit", ["run", "--threshold", "0.3"], "--threshold 0.3 is written threshold=0.3 here."),
        ("pipeline.audit", ["run", "--threshold=0.3"], "--threshold=0.3 is written threshold=0.3 here."),
        ("pipeline.audit", ["--best", "run"], "--best is written best=true here."),
        ("pipeline.audit", ["--apply", "run"], "--apply is written apply=decisions here."),
        ("pipeline.audit", ["run", "--apply", "drop"], "--apply drop is written apply=drop here."),
        ("pipeline.audit", ["run", "--per-class", "3"], "--per-class 3 is written per_class=3 here."),
        ("pipeline.predict", ["run", "a.png", "--jsonl"], "--jsonl is written jsonl=true here."),
        ("pipeline.report", ["--uri", "http://x"], "--uri http://x is written uri=http://x here."),
        ("pipeline.report", ["--uri", "http://u:pw@x"], "--uri http://***@x is written uri=http://***@x here."),
        ("pipeline.audit", ["run", "http://u:pw@x"], "'http://***@x' is one word too many."),
        ("pipeline.audit", ["run", "--treshold", "1"], "There is no option --treshold. Did you mean threshold=...?"),
        ("launch.sweep", ["--vary", "seed=0,1", "out=x"], "--vary seed=0,1 is written vary.seed=0,1 here."),
    ],
)
def test_every_command_answers_a_mistake_without_torch(module: str, words: list[str], expected: str) -> None:
    done = answer(module, *words)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


class Words(settings.Settings):
    run: str = Field(description="a run")
    files: list[str] = Field(description="files")
    out: str = Field("", description="a folder")
    names: settings.Names = Field([], description="names")
    tags: dict[str, str] = Field({}, description="tags")


WORDS = cli.Command("command", "", Words, words=("run", "files"))


def test_plain_words_fill_their_settings_in_order(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=0.1").touch()
    config = WORDS.load(["2024", "out=1e3", "-", "names=1e3,b", "lr=0.1", "s3://bucket/a?b=c", "tags.a.b/c=7"])
    assert config.run == "2024"  # text as it stands, whatever YAML would make of it
    assert config.files == ["-", "lr=0.1", "s3://bucket/a?b=c"]
    assert (config.out, config.names, config.tags) == ("1e3", ["1e3", "b"], {"a.b/c": "7"})
    assert WORDS.load(["run=a", "b"]).files == ["b"]
    assert WORDS.load(["a", "files=[b, c]", 'out="x"']) == Words(run="a", files=["b", "c"], out="x")
    with pytest.raises(UserError, match="There is no setting 'lr'"):
        WORDS.load(["a", "b", "lr=0.2"])


def test_words_stand_in_the_usage_and_in_what_is_printed(capsys) -> None:
    with pytest.raises(SystemExit):
        WORDS.load(["--help"])
    assert "usage: command RUN FILES... [--config FILE]" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        WORDS.load(["a", "b", "--print-config"])
    assert capsys.readouterr().out.startswith("run: a\nfiles:\n- b\n")


def test_a_shipped_config_is_found_by_name_from_any_folder(tmp_path, monkeypatch) -> None:
    here = configuration.load(["--config", str(Path(__file__).parents[2] / "configs/cifar10_lt.yaml")])
    monkeypatch.chdir(tmp_path)
    for name in ("cifar10_lt", "cifar10_lt.yaml", "configs/cifar10_lt.yaml"):
        assert configuration.load(["--config", name]) == here
    told = refused("--config", "cifar10lt")
    assert "There is no config file cifar10lt. Did you mean cifar10_lt?" in told
    shipped = sorted(file.stem for file in (Path(__file__).parents[2] / "configs").glob("*.yaml"))
    assert "photos_scratch" in shipped
    assert f"Files that come along: {', '.join(shipped)}." in told
    assert "There is no config file other/digits.yaml" in refused("--config", "other/digits.yaml")
    (tmp_path / "digits.yaml").write_text("seed: 7\n")  # a file that is here comes first
    assert configuration.load(["--config", "digits.yaml"]).seed == 7


def test_help_and_errors_need_no_torch() -> None:
    code = "import sys; from pipeline import train, config; config.load(['train.epochs=2']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=HERE)
    start = time.monotonic()
    train = [sys.executable, "-m", "pipeline.train"]
    done = subprocess.run([*train, "train.epoch=3"], capture_output=True, text=True, env=HERE)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert time.monotonic() - start < 20  # bounds a hang; the usual time is a third of a second
    shown = subprocess.run([*train, "--help"], capture_output=True, text=True, env=HERE).stdout
    assert "train.epochs (int, default 50)" in shown
    assert "method.name=prototypical" in shown


@pytest.mark.parametrize("name", [
    "digits", "fashion_lt", "cifar10_lt", "cifar10_lt_small", "cifar10_features", "cifar10n", "cifar100_lt", "webvision_mini",
])  # fmt: skip
@pytest.mark.parametrize("recipe", ["own", "common"])
def test_every_method_has_a_valid_recipe_in_every_config(name, recipe) -> None:
    from typing import get_args

    from pipeline.methods.options import MethodOptions

    for options in get_args(get_args(MethodOptions)[0]):
        method = options.model_fields["name"].default
        config = configuration.load([f"--config=configs/{name}.yaml", f"method.name={method}", f"recipe={recipe}"])
        assert config.method.name == method
