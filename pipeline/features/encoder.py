"""A frozen backbone: pictures in, features out, without gradient."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from pipeline.config import Config
from pipeline.models.backbones import build_backbone
from pipeline.models.precision import autocast_for
from shards.base.errors import UserError
from shards.base.storage import store_at
from shards.features import BACKBONE, read_features


class Encoder:
    """From normalised images (B,3,S,S) to features (B,D), with the digits that a features file keeps."""

    def __init__(self, backbone: nn.Module, width: int, config: Config, device: torch.device) -> None:
        # channels_last whatever model.channels_last says: it is faster on CPU and GPU, and features have one layout.
        backbone.to(device, memory_format=torch.channels_last).eval().requires_grad_(False)  # type: ignore[call-overload]
        self.backbone, self.width = backbone, width
        self.autocast = autocast_for(config.train.precision, device)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        with self.autocast:
            features: Tensor = self.backbone(images)
        return features.half().float()  # so that a model gives one answer for stored and for fresh features

    def state_dict(self) -> dict[str, Tensor]:
        plain = torch.contiguous_format
        return {name: v.detach().cpu().clone(memory_format=plain) for name, v in self.backbone.state_dict().items()}

    def to_bytes(self) -> bytes:
        """The weights in the safetensors format."""
        from safetensors.torch import save

        data: bytes = save(self.state_dict())
        return data


def pretrained_encoder(config: Config, device: torch.device) -> Encoder:
    """The encoder with the weights of model.pretrained; without, with random ones drawn from the seed 0."""
    torch.manual_seed(0)
    return Encoder(*build_backbone(config.model), config, device)


def encoder_of(config: Config, weights: bytes, where: str, device: torch.device) -> Encoder:
    """The encoder with the weights that `to_bytes` gave."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    backbone, width = build_backbone(config.model.model_copy(update={"pretrained": ""}))
    try:
        backbone.load_state_dict(load(weights))
    except (SafetensorError, RuntimeError) as error:
        raise UserError(
            f"{where} does not hold the weights of {config.model.backbone} ({str(error).splitlines()[0]}). "
            "Take another copy of it."
        ) from None
    return Encoder(backbone, width, config, device)


def stored_encoder(config: Config, features: str, device: torch.device) -> Encoder:
    """The encoder that made stored features."""
    about, store = read_features(features), store_at(features)
    if about is None:
        raise UserError(
            f"The backbone of this model was stored with its features, and there are none at {store} any more. Use the "
            "exported model of the run (its folder `model`), which holds the backbone."
        )
    data = store.read(BACKBONE, about.backbone.bytes)
    if data is None or hashlib.sha256(data).hexdigest() != about.backbone.sha256:
        raise UserError(f"{store}/{BACKBONE} is missing or was altered. Copy it again from where it came.")
    return encoder_of(config, data, f"{store}/{BACKBONE}", device)
