"""What an early layer of a backbone says of pictures: its maps, averaged over their area."""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.config import ModelConfig
from pipeline.models.network import Network
from shards.base.errors import UserError


class MiddleLayer:
    """The layer with the given name; without a name the second stage, if the backbone has stages under a known name."""

    def __init__(self, config: ModelConfig, name: str, backbone: nn.Module) -> None:
        self.name = name or _second_stage(backbone)
        known = dict(backbone.named_modules())
        if self.name not in known:
            some = ", ".join(known_name for known_name in known if known_name.count(".") < 2 and known_name)
            raise UserError(
                f"method.layer={name} is no layer of model.backbone={config.backbone}. It has {some or 'none by name'}."
            )
        if self.name and config.compile:
            raise UserError(
                "method.name=pls_lsa reads an early layer, which a compiled network does not show. Set model.compile=false."
            )

    def of(self, network: Network, images: Tensor) -> tuple[Tensor | None, tuple[Tensor, Tensor]]:
        """(B,C) averages of the layer, None where there is no such layer; and what the network returns."""
        if not self.name:
            return None, network(images)
        seen: list[Tensor] = []
        hook = network.backbone.get_submodule(self.name).register_forward_hook(lambda *call: seen.append(call[2]))
        try:
            out = network(images)
        finally:
            hook.remove()
        maps = seen[-1].float()
        return maps.mean((2, 3)) if maps.ndim == 4 else maps.flatten(1, -2).mean(1), out


def _second_stage(backbone: nn.Module) -> str:
    for name in ("stages", "blocks"):
        stages = getattr(backbone, name, None)
        if isinstance(stages, nn.Sequential | nn.ModuleList) and len(stages):
            return f"{name}.{min(1, len(stages) - 1)}"
    return "layer2" if hasattr(backbone, "layer2") else ""
