"""The backbone is found in files of most projects, and only where it fits completely."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeline.config import ModelConfig
from pipeline.models import timm_models
from pipeline.models.backbones import build_backbone
from pipeline.models.preact_resnet import PreActResNet18
from pipeline.models.weight_names import match
from shards.base.errors import UserError

State = dict[str, Tensor]


def state(seed: int = 0) -> State:
    torch.manual_seed(seed)
    return {name: torch.rand_like(t) if t.ndim else t for name, t in PreActResNet18(1).state_dict().items()}


def put(prefix: str, weights: State) -> State:
    return {prefix + name: value for name, value in weights.items()}


def load(folder: Path, content: Any) -> State:
    file = folder / "weights.pth"
    torch.save(content, file)
    return build_backbone(ModelConfig(width=1, pretrained=str(file)))[0].state_dict()


def assert_is(loaded: State, wanted: State) -> None:
    assert all(torch.equal(value, loaded[name]) for name, value in wanted.items())


HEADS = {"fc.weight": torch.ones(9, 8), "head.bias": torch.ones(9), "projector.0.weight": torch.ones(3, 8)}
WRAPPED: dict[str, Callable[[State], Any]] = {
    "plain, with heads": lambda w: w | HEADS,
    "state_dict": lambda w: {"state_dict": w, "epoch": 3, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}},
    "a training that saves its options": lambda w: {"model": w, "args": Namespace(lr=0.1)},
    "model_state": lambda w: {"model_state": w},
    "DistributedDataParallel": lambda w: put("module.", w),
    "model.": lambda w: put("model.", w),
    "encoder.": lambda w: put("encoder.", w),
    "SimCLR": lambda w: put("backbone.", w) | put("projector.", HEADS),
    "VICReg": lambda w: {"model": put("module.backbone.", w)},
    "convnet.": lambda w: {"state_dict": put("convnet.", w)},
    "our own model": lambda w: put("network.backbone.", w) | {"network.head.weight": torch.ones(9, 8)},
    "double precision": lambda w: {name: value.double() for name, value in w.items()},
}
# The copy that is meant is listed second, so that order alone does not find it.
TWO_COPIES: dict[str, tuple[str, str, Callable[[State, State], Any]]] = {
    "MoCo": (
        "state_dict.module.encoder_q.",
        "state_dict.module.encoder_k.",
        lambda meant, other: {"state_dict": put("module.encoder_k.", other) | put("module.encoder_q.", meant)},
    ),
    "MoCo v3": (
        "state_dict.module.base_encoder.",
        "state_dict.module.momentum_encoder.",
        lambda meant, other: {
            "state_dict": put("module.momentum_encoder.", other) | put("module.base_encoder.", meant)
        },
    ),
    "solo-learn": (
        "state_dict.backbone.",
        "state_dict.momentum_backbone.",
        lambda meant, other: {"state_dict": put("momentum_backbone.", other) | put("backbone.", meant)},
    ),
    "DINO": (
        "teacher.backbone.",
        "student.module.backbone.",
        lambda meant, other: {"student": put("module.backbone.", other), "teacher": put("backbone.", meant)},
    ),
    "our own average": (
        "average.network.backbone.",
        "network.backbone.",
        lambda meant, other: put("network.backbone.", other) | put("average.network.backbone.", meant),
    ),
}


@pytest.mark.parametrize("form", WRAPPED)
def test_wrappers_prefixes_and_heads_are_seen_through(form: str, tmp_path: Path) -> None:
    assert_is(load(tmp_path, WRAPPED[form](state())), state())


@pytest.mark.parametrize("project", TWO_COPIES)
def test_of_two_copies_the_one_that_is_meant_is_taken_and_both_are_named(
    project: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    taken, left, make = TWO_COPIES[project]
    assert_is(load(tmp_path, make(state(1), state(2))), state(1))
    assert f"all weights found behind '{taken}' by name" in caplog.text
    assert f"also behind '{left}'; these are not used" in caplog.text


def test_what_is_left_over_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    load(tmp_path, state() | HEADS)
    assert "3 tensors, such as fc.weight, head.bias, projector.0.weight" in caplog.text


def test_old_files_without_counters_of_batches_are_complete(tmp_path: Path) -> None:
    kept = {name: value for name, value in state().items() if not name.endswith("num_batches_tracked")}
    assert len(kept) < len(state())
    assert_is(load(tmp_path, kept), kept)


def test_one_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    weights = state()
    del weights["stages.3.1.conv2.weight"]
    with pytest.raises(UserError, match=r"1 of \d+ tensors are missing, for example stages\.3\.1\.conv2\.weight"):
        load(tmp_path, {"state_dict": put("module.", weights)})


def test_another_width_is_refused_with_both_shapes(tmp_path: Path) -> None:
    sentence = (
        r"have other shapes, for example stem\.0\.weight is \(2, 3, 3, 3\), not \(1, 3, 3, 3\).*same architecture"
    )
    with pytest.raises(UserError, match=sentence):
        load(tmp_path, PreActResNet18(2).state_dict())


def test_a_file_of_something_else_is_refused_with_examples(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none of its names is one of the backbone: it has words\.table,"):
        load(tmp_path, {"words": {"table": torch.ones(4, 4)}})


# -- other names, the same order -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("mobilenet_v2", "mobilenetv2_100"), ("efficientnet_b0", "efficientnet_b0"), ("densenet121", "densenet121")],
)
def test_weights_of_torchvision_give_the_same_features_in_timm(theirs: str, ours: str, tmp_path: Path) -> None:
    timm_models.import_timm()
    from torchvision import models

    torch.manual_seed(0)
    source = getattr(models, theirs)().eval()
    for norm in source.modules():  # statistics that would show a mistake
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.uniform_(-0.1, 0.1)
            norm.running_var.uniform_(0.5, 1.5)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    backbone, _ = build_backbone(ModelConfig(backbone=ours, pretrained=str(tmp_path / "w.pth")))
    source.classifier = nn.Identity()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        features, expected = backbone.eval()(images), source(images)
    assert expected.std() > 1e-3
    assert torch.allclose(features, expected, rtol=1e-3, atol=1e-5 + 1e-4 * float(expected.abs().max()))


WANTED = {"conv.weight": torch.ones(4, 3), "norm.weight": torch.ones(4), "norm.bias": torch.ones(4)}


def test_other_names_count_only_if_kind_and_shape_agree_one_by_one() -> None:
    theirs = {
        "model._conv.weight": torch.zeros(4, 3),
        "model._bn.weight": torch.zeros(4),
        "model._bn.bias": torch.ones(4),
    }
    head = {"model._fc.weight": torch.ones(9, 4)}
    found = match(theirs | head, WANTED)
    assert (found.prefix, found.in_order, found.left_over) == ("model.", True, ["model._fc.weight"])
    assert [float(value.mean()) for value in found.tensors.values()] == [0, 0, 1]
    swapped = {name: theirs[name] for name in ("model._conv.weight", "model._bn.bias", "model._bn.weight")}
    for wrong in (swapped, head | theirs, {**theirs, "model._conv.weight": torch.zeros(4, 1)}):
        with pytest.raises(UserError):
            match(wrong, WANTED)
