"""The estimate of memory against real trainings, and runs that cannot fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peak_memory import peak_of_tensors
from ranks import on_ranks
from rivals import CLASSES, SAMPLES, Course, Pictures, make_method, small_config, survey_of

from launch.sweep import method_names
from pipeline.config import Asked, Config, take_estimate
from pipeline.distributed.world import World
from pipeline.methods.parts import logistic_regression, transition
from pipeline.models.network import Average
from pipeline.train import main
from pipeline.training import estimate, memory_check
from pipeline.training.build import build
from shards.base.errors import UserError

METHODS = method_names()


# Options with which three epochs go through the phases of a method.
PHASES: dict[str, dict[str, Any]] = {
    "prototypical": {"warmup_steps": 2, "cleaning_start": 0.34},
    "rrl": {"warmup_steps": 2, "cleaning_start": 0.34, "neighbours": 5},
    "mopro": {"queue": 24},
    **{name: {"warmup": 0.34} for name in ("dividemix", "rolt", "sfa", "dasc")},
}


def configured(name: str, **sections: Any) -> Config:
    return small_config(
        {"name": name, **PHASES.get(name, {})}, train={"epochs": 3} | sections.pop("train", {}), **sections
    )


def held(world: World, name: str, **sections: Any) -> dict[str, int]:
    """What a real trainer holds between two steps, in bytes."""
    ema = {} if name == "elr_plus" else {"ema": 0.9}
    model = {"norm": "batch", **ema, **sections.pop("model", {})}
    run = Course(configured(name, model=model, **sections), world=world)
    method, engine = run.method, run.trainer.engine
    tables = {f"table: {key}": value.nbytes for key, value in method.named_buffers(recurse=False)}
    averages = [module for module in method.modules() if isinstance(module, Average)]
    average = sum(t.nbytes for module in averages for t in (*module.parameters(), *module.buffers()))
    everything = sum(t.nbytes for t in (*method.parameters(), *method.buffers()))
    state: Any = engine.optimizer_state_dict()
    kept = [key for key in ("momentum", "exp_avg", "exp_avg_sq") if key in state]
    learned = sum(t.nbytes for t in state[kept[0]].values())
    optimiser = sum(t.nbytes for key in kept for t in state[key].values())
    weights = everything - average - sum(tables.values())
    named = {"weights": weights, " and ".join(kept): optimiser, "gradients": learned, "average of the weights": average}
    return named | tables


@pytest.mark.parametrize("name", METHODS)
def test_weights_momentum_average_and_tables_are_exact(name: str) -> None:
    ema = {} if name == "elr_plus" else {"ema": 0.9}
    config = configured(name, model={"norm": "batch", **ema})
    found = estimate.standing(config, SAMPLES, CLASSES, 1)
    assert {part.name: part.bytes for part in found.device} == held(World(), name)


@pytest.mark.parametrize("name", ["cross_entropy", "har", "dividemix"])
def test_adamw_keeps_two_numbers_of_a_weight_and_a_frozen_one_has_neither_these_nor_a_gradient(name: str) -> None:
    finetuning: dict[str, Any] = {"optim": {"name": "adamw"}, "model": {"freeze": True}}
    found = {}
    for key, sections in (("plain", {}), ("adamw", {"optim": {"name": "adamw"}}), ("frozen", finetuning)):
        model = {"norm": "batch", "ema": 0.9, **sections.get("model", {})}
        config = configured(name, **{**sections, "model": model})
        parts = estimate.standing(config, SAMPLES, CLASSES, 1)
        found[key] = {part.name: part.bytes for part in parts.device}
        assert found[key] == held(World(), name, **sections)
        found[key]["saved"] = parts.main[0].bytes
    plain, adamw, frozen = found.values()
    assert adamw["exp_avg and exp_avg_sq"] == 2 * plain["momentum"]
    assert adamw["saved"] == plain["saved"] + plain["momentum"]
    assert frozen["weights"] == plain["weights"]
    assert frozen["gradients"] < plain["gradients"] / 10


def test_a_frozen_backbone_keeps_no_activations() -> None:
    frozen, free = (
        estimate.activations(configured("cross_entropy", model={"freeze": freeze}), CLASSES, 1)[0]
        for freeze in (True, 1)
    )
    assert frozen < free / 3


@pytest.mark.dist
def test_tables_are_divided_by_the_ranks() -> None:
    found = estimate.standing(configured("elr", model={"norm": "batch", "ema": 0.9}), SAMPLES, CLASSES, 2)
    assert {part.name: part.bytes for part in found.device} == on_ranks(2, held, "elr")[1]
    alone = estimate.standing(configured("elr", model={"norm": "batch", "ema": 0.9}), SAMPLES, CLASSES, 1)
    assert found.main == alone.main  # a checkpoint is the same for any number of ranks


def test_zero_divides_what_it_should() -> None:
    def size(ranks: int, stage: int) -> dict[str, int]:
        config = configured("cross_entropy")
        deepspeed = config.deepspeed.model_copy(update={"stage": stage})
        config = config.model_copy(update={"engine": "deepspeed", "deepspeed": deepspeed})
        return {part.name: part.bytes for part in estimate.standing(config, SAMPLES, CLASSES, ranks).device}

    whole = size(1, 0)
    for stage, divided in (
        (1, {"momentum"}),
        (2, {"momentum", "gradients"}),
        (3, {"momentum", "gradients", "weights"}),
    ):
        part = size(4, stage)
        for name in ("weights", "gradients", "momentum"):
            assert part[name] == pytest.approx(whole[name] / (4 if name in divided else 1), rel=0.01), (stage, name)


def saved_bytes(config: Config, pictures: Pictures) -> int:
    """The most that autograd saves in a forward pass of a real training, with the images."""
    run, sizes = Course(config, pictures), []
    forward = run.method.forward

    def counted(batch: Any) -> Any:
        parts = [batch] if batch.second is None else [batch, batch.second]
        seen = {v.untyped_storage().data_ptr(): v.nbytes for part in parts for v in part.views.values()}
        own = {t.untyped_storage().data_ptr() for t in (*run.method.parameters(), *run.method.buffers())}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if (key := tensor.untyped_storage().data_ptr()) not in own:
                seen[key] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            losses = forward(batch)
        sizes.append(sum(seen.values()))
        return losses

    run.method.forward = counted  # type: ignore[method-assign]
    for _ in run.steps():
        pass
    return max(sizes, default=0)  # a method without steps has none


@pytest.mark.parametrize("name", METHODS)
def test_activations_are_those_of_a_real_step(name: str) -> None:
    config = configured(name, model={"norm": "batch"}, data={"size": 16})
    assert estimate.activations(config, CLASSES, 1)[0] == pytest.approx(saved_bytes(config, Pictures()), rel=0.25)


def test_activations_in_half_precision() -> None:
    config = configured("cross_entropy", model={"width": 8}, data={"size": 16}, train={"precision": "bf16"})
    assert estimate.activations(config, CLASSES, 1)[0] == pytest.approx(saved_bytes(config, Pictures()), rel=0.25)


def test_what_saves_memory_is_seen_to_save_it() -> None:
    def activations(ranks: int = 1, **sections: Any) -> int:
        model = {"width": 16, **sections.pop("model", {})}
        return estimate.activations(configured("cross_entropy", model=model, data={"size": 32}, **sections), 3, ranks)[
            0
        ]

    whole = activations()
    assert activations(ranks=4) == pytest.approx(whole / 4, rel=0.15)
    assert activations(optim={"accumulate": 4}) == pytest.approx(whole / 4, rel=0.15)
    assert activations(model={"checkpoint_activations": True}) < whole / 2


def test_latent_needs_for_its_fit_what_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run on features; with fewer rounds, which hold as much. A rank of two needs about half."""
    monkeypatch.setattr(logistic_regression, "STEPS", 1)
    monkeypatch.setattr(transition, "STEPS", 1)
    monkeypatch.setattr(transition, "GRID", [1.0])
    monkeypatch.setattr(transition, "REFINEMENTS", ())
    samples, classes = 20_000, 100
    config = configured("latent", model={"width": 8, "from_features": True}, data={"loader": "features"})
    parts = {part.name: part.bytes for part in estimate.estimate(config, samples, classes, 1).device}

    method = make_method(config, np.arange(samples, dtype=np.int32) % classes, classes)
    survey = survey_of({"features": torch.randn(samples, method.network.features)})
    assert parts["survey of this rank's samples"] == survey["features"].nbytes
    expected = sum(size for name, size in parts.items() if name.startswith("fit: "))
    assert expected > 3 * 4 * samples * classes
    assert peak_of_tensors(lambda: method.begin_epoch(survey)) == pytest.approx(expected, rel=0.1)
    half = estimate.estimate(config, samples, classes, 2).device
    assert sum(part.bytes for part in half if part.name.startswith("fit: ")) < 0.75 * expected


# -- runs that cannot fit ------------------------------------------------------------------------------------------------


def test_a_run_that_cannot_fit_is_refused_before_it_takes_memory(digits: str, tmp_path: Path) -> None:
    settings = {"output": str(tmp_path), "shards": {"url": digits}, "tracking": {"uri": ""}, "model": {"width": 60_000}}
    with pytest.raises(
        UserError, match=r"needs at least \d+\.\d GB in host memory, .* largest parts: .* GB.*--estimate"
    ):
        build(Config.model_validate(settings), World())


def test_less_than_all_but_more_than_free_is_a_warning() -> None:
    parts = [estimate.Part("one thing", 5 * 10**9), estimate.Part("another", 10**9)]
    assert memory_check._problem(parts, 1, "here", 7 * 10**9, 8 * 10**9) is None
    refused, sentence = memory_check._problem(parts, 1, "here", 5 * 10**9, 8 * 10**9) or (None, "")
    assert refused is False
    assert "6.0 GB here" in sentence
    assert "one thing 5.0 GB, another 1.0 GB" in sentence
    assert (memory_check._problem(parts, 1, "here", 10**9, 5 * 10**9) or (None,))[0] is True


def test_a_machine_has_no_more_free_memory_than_memory() -> None:
    free, total = memory_check.host_memory()
    assert 0 < free <= total


# -- the command ---------------------------------------------------------------------------------------------------------


def test_the_command_prints_and_does_nothing_else(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["method.name=rrl", "data.size=8", "--estimate", "--ranks", "8", "--samples=2400000", "--classes", "1000"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "8 ranks" in out
    assert "2,400,000 samples, 1,000 classes (as given)" in out
    assert "soft_rows: 4,000 bytes for every sample that gets a row, at most 9.60 GB" in out
    assert not list(tmp_path.iterdir())


def test_sizes_come_from_the_shards_where_there_are_some(digits: str, capsys) -> None:
    assert main([f"shards.url={digits}", "--estimate"]) == 0
    assert f"10 classes (from {digits})" in capsys.readouterr().out
    with pytest.raises(UserError, match="--samples 100000 --classes 50"):
        main(["shards.source=folder", "shards.path=/nowhere", "--estimate"])


def test_options_beside_the_estimate() -> None:
    assert take_estimate(["a=1"]) == (None, ["a=1"])
    assert take_estimate(["a=1", "--ranks=3", "--estimate", "b=2"]) == (Asked(ranks=3), ["a=1", "b=2"])
    for wrong in (["--ranks"], ["--ranks", "many"], ["--samples=0"]):
        with pytest.raises(UserError, match="needs a number"):
            take_estimate(["--estimate", *wrong])
    with pytest.raises(UserError, match="--ranks stands beside --estimate"):
        main(["--ranks", "8"])
