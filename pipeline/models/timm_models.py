"""timm's models by name: which there are, what their published weights expect, which pictures they take."""

from __future__ import annotations

import difflib
from typing import Any

import torch

from shards.base.errors import UserError

OWN = "preact_resnet18"  # the backbone that is not timm's


def import_timm() -> Any:
    from pipeline.models import torchvision_compat

    torchvision_compat.patch_torchvision()
    import timm

    return timm


def published(name: str) -> Any:
    """timm's PretrainedCfg of a model, `resnet50` or with the tag of its weights, `resnet50.a1_in1k`."""
    timm = import_timm()
    models = timm.list_models()
    model, _, tag = name.partition(".")
    if model not in models:
        matches = difflib.get_close_matches(model, [OWN, *models], 1)
        hint = f" Did you mean '{matches[0]}'?" if matches else " timm.list_models() names them all."
        raise UserError(f"model.backbone: there is no backbone '{name}'.{hint}")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{model}.*")]
    if tag and tag not in tags:
        known = f" It has {', '.join(tags)}." if tags else ""
        raise UserError(f"model.backbone: timm has no weights '{tag}' of {model}.{known} Or leave .{tag} out.")
    return timm.get_pretrained_cfg(name)


def create(name: str, file: str = "") -> torch.nn.Module:
    """The model without its head; with the published weights in `file`, where timm renames what needs it."""
    published(name)
    # drop_rate=0 because the ports the papers trained have no dropout before the head
    options: dict[str, Any] = {"num_classes": 0, "drop_rate": 0.0}
    if file:  # custom_load is for files of other frameworks; those of the hub are torch's
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"file": file, "custom_load": False}}
    try:
        model: torch.nn.Module = import_timm().create_model(name, **options)
    except Exception as error:
        if not file:
            raise
        raise UserError(
            f"model.pretrained: the weights of {name} in {file} cannot be loaded ({first_line(error)}). Remove that file to "
            "fetch it again, or give another one with model.pretrained=FILE."
        ) from None
    return model


def check_picture_size(name: str, size: int) -> None:
    """Refuse pictures that the backbone cannot take. A forward pass of shapes alone, so it is cheap."""
    if name == OWN:
        return
    problem = _problem(name, size)
    usual = int(published(name).input_size[-1])
    # A model that cannot run without data at all is not judged.
    if problem and size != usual and not _problem(name, usual):
        raise UserError(
            f"model.backbone={name} cannot take pictures of {size} pixels ({problem}). Set data.size={usual}, the size "
            "it was made for, or choose another backbone."
        )


def _problem(name: str, size: int) -> str:
    try:
        with torch.device("meta"), torch.no_grad():
            create(name).eval()(torch.empty(2, 3, size, size))
    except UserError:
        raise
    except Exception as error:  # timm asserts, torch raises
        return first_line(error)
    return ""


def first_line(error: Exception) -> str:
    """What an error of a library says, for one sentence of ours."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
