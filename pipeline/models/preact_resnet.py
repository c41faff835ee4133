"""PreAct ResNet-18 for small pictures, as the noisy-label literature uses it.

Two details of that literature change published numbers and are kept: the identity shortcut takes the activated input, and
there is no normalisation after the last stage.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(min(8, channels), channels)


def _conv3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


class PreActBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.norm1, self.conv1 = _norm(norm, inputs), _conv3(inputs, outputs, stride)
        self.norm2, self.conv2 = _norm(norm, outputs), _conv3(outputs, outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x))
        inner = self.conv2(F.relu(self.norm2(self.conv1(activated))))
        out: Tensor = inner + self.shortcut(activated)
        return out


class PreActResNet18(nn.Module):
    def __init__(self, width: int = 64, norm: str = "batch") -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv3(3, width), _norm(norm, width), nn.ReLU())
        channels = width
        stages: list[nn.Module] = []
        for outputs, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            stages.append(
                nn.Sequential(PreActBlock(channels, outputs, stride, norm), PreActBlock(outputs, outputs, 1, norm))
            )
            channels = outputs
        self.stages = nn.Sequential(*stages)
        self.features = channels

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.stages(self.stem(images))
        return maps.mean((2, 3))
