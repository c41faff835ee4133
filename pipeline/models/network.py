"""A backbone with a linear head and, for methods with embeddings, a projector onto the unit sphere."""

from __future__ import annotations

import copy
from types import EllipsisType
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.config import ModelConfig
from pipeline.distributed.world import World
from pipeline.models.backbones import FeatureInput, build_backbone, checkpoint_activations, feature_width
from pipeline.models.batchnorm import BatchNorm, CountedRows, convert_batchnorm
from pipeline.models.precision import full_precision

M = TypeVar("M", bound=nn.Module)


@full_precision
def unit(x: Tensor) -> Tensor:
    """Rows of length one; a zero row stays zero instead of becoming NaN."""
    return F.normalize(x, dim=-1, eps=1e-12)


@full_precision
def power_norm(features: Tensor) -> Tensor:
    """Signed powers of 0.7, scaled to length one: between the features themselves and their roots."""
    return unit(features.sign() * (features.abs() + 1e-6) ** 0.7)


@full_precision
def root_norm(features: Tensor) -> Tensor:
    """Signed square roots, scaled to length one: a few large features no longer outweigh the others."""
    # The root's slope is infinite at zero, where many features of a network with ReLU are.
    return unit(features.sign() * (features.abs() + 1e-6).sqrt())


class CosineHead(nn.Module):
    """Cosine of the feature with one unit vector per class (LDAM's classifier)."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, features))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, features: Tensor) -> Tensor:
        return full_precision(F.linear)(unit(features), unit(self.weight))


class Network(nn.Module):
    def __init__(
        self, config: ModelConfig, classes: int, world: World, embed: bool = False, cosine_head: bool = False
    ) -> None:
        super().__init__()
        backbone: nn.Module
        if config.from_features:
            backbone, self.features = FeatureInput(), feature_width(config)
        else:
            backbone, self.features = build_backbone(config)
        self.feature_norm = config.feature_norm
        self.freeze_statistics = config.freeze_statistics
        self.frozen = False  # the backbone rests in this epoch (Method.set_epoch)
        self.rows = CountedRows(world if config.sync_batchnorm else None)
        self.backbone = convert_batchnorm(backbone, self.rows)
        if config.feature_norm == "batch":
            self.norm = convert_batchnorm(nn.BatchNorm1d(self.features, affine=False), self.rows)
        self.has_batchnorm = any(isinstance(module, BatchNorm) for module in self.modules())
        if config.checkpoint_activations and not config.from_features:
            checkpoint_activations(self.backbone, config.backbone, self.rows)
        self.head: nn.Module = CosineHead(self.features, classes) if cosine_head else nn.Linear(self.features, classes)
        self.projector = nn.Linear(self.features, config.embedding) if embed else None
        if config.channels_last and not config.from_features:
            self.backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if config.compile and not config.from_features:
            self.backbone.compile()  # in place: state_dict names do not change

    def train(self, mode: bool = True) -> Network:
        """A frozen backbone stays in evaluation mode, so its running statistics do not move."""
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        elif self.freeze_statistics:
            for module in self.backbone.modules():
                if isinstance(module, BatchNorm):
                    module.eval()
        return self

    def rest(self) -> None:
        """Evaluation mode for all of `encode`."""
        self.backbone.eval()
        if self.feature_norm == "batch":
            self.norm.eval()

    def forward(self, images: Tensor, mask: Tensor | EllipsisType | None = ...) -> tuple[Tensor, Tensor]:
        """(features, logits)

        mask: (B,) 0 for rows that must not count in batch statistics, None if all count; needed in training with batch norm. `images` may be
        several views of the B rows, one after the other, or stored features (B,D) of a network that starts from these.
        """
        if isinstance(mask, EllipsisType):
            if self.training and self.has_batchnorm:
                raise TypeError("a network in training needs to know which rows count: pass batch.mask")
            mask = None
        elif mask is not None:
            mask = mask.repeat(len(images) // len(mask))
        with self.rows.use(mask):
            features = self.encode(images)
        return features, self.head(features)

    def encode(self, images: Tensor) -> Tensor:
        """(B,F) what head and projector see."""
        features: Tensor = self.backbone(images)
        if self.feature_norm == "none":
            return features
        if self.feature_norm == "power":
            return power_norm(features)
        features = root_norm(features)
        if self.feature_norm == "batch":
            features = self.norm(features)
        return features

    def embed(self, features: Tensor) -> Tensor:
        """(B,D) on the unit sphere, in float32."""
        assert self.projector is not None
        return unit(self.projector(features))


class Average(nn.Module, Generic[M]):
    """Moving average of a module's parameters; buffers are copied. No optimiser moves what lies in it."""

    def __init__(self, network: M, decay: float) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).requires_grad_(False)
        for copied, module in zip(self.network.modules(), network.modules()):
            if module._compiled_call_impl is not None:  # which deepcopy leaves out
                copied.compile()
        self.decay = decay

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Average the parameters that are trained now; the average of frozen ones does not move."""
        pairs = [pair for pair in zip(self.network.parameters(), network.parameters()) if pair[1].requires_grad]
        if pairs:
            old, new = (list(part) for part in zip(*pairs))
            torch._foreach_lerp_(old, new, 1 - self.decay)
        by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # one kernel copies tensors of one type
        for copied, value in zip(self.network.buffers(), network.buffers()):
            for part, tensor in zip(by_type.setdefault(value.dtype, ([], [])), (copied, value)):
                part.append(tensor)
        for copies, values in by_type.values():
            torch._foreach_copy_(copies, values)
