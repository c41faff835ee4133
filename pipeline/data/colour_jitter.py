"""Changes of colour for contrastive learning (SimCLR, Chen et al., ICML 2020): brightness, contrast, saturation, hue, grey.

Brightness, saturation, hue and grey are linear in a pixel's channels, and contrast stretches the picture about its mean luma.
So the host multiplies what it has drawn into one small matrix for each picture. Grey pictures stay grey. Nothing is cut
between the operations, only at the end. B pictures.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

DRAWS = 6  # whether colours change, brightness, contrast, saturation, hue, whether the picture turns grey
CHANGED, GREYED = 0.8, 0.2  # shares of the pictures
STRENGTH, HUE = (
    0.4,
    0.1,
)  # factors within 1 +- STRENGTH, hues within +- HUE of a full turn: those of the paper for CIFAR-10
LUMA = np.array([0.299, 0.587, 0.114])


def draw(uniforms: np.ndarray) -> Tensor:
    """uniforms (B, DRAWS) to (B, 4, 3) float32: three rows for a pixel, one for the mean pixel of the picture."""
    changed, brightness, contrast, saturation, hue, grey = uniforms.T
    bright, contrasted, saturated = (
        np.where(changed < CHANGED, 1 + STRENGTH * (2 * u - 1), 1.0)[:, None, None]
        for u in (brightness, contrast, saturation)
    )
    turn = np.where(changed < CHANGED, HUE * (2 * hue - 1), 0.0)
    saturated = np.where(grey[:, None, None] < GREYED, 0.0, saturated)
    colours = bright * _saturation(saturated) @ _hue(turn)  # (B, 3, 3)
    shift = (1 - contrasted) * (LUMA @ colours)[:, None]  # (B, 1, 3)
    return torch.from_numpy(np.concatenate([contrasted * colours, shift], 1)).float()


def _saturation(factor: np.ndarray) -> np.ndarray:
    """(B, 3, 3) between a pixel's luma (0) and itself (1)."""
    out: np.ndarray = factor * np.eye(3) + (1 - factor) * np.tile(LUMA, (3, 1))
    return out


def _hue(turn: np.ndarray) -> np.ndarray:
    """(B, 3, 3) rotation of the colours about the grey axis by `turn` of a full circle (Rodrigues' formula)."""
    cross = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / np.sqrt(3)
    angle = (2 * np.pi * turn)[:, None, None]
    out: np.ndarray = np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * (cross @ cross)
    return out


def change_colours(pictures: Tensor, draws: Tensor) -> Tensor:
    """(B, 3, S, S) uint8 to levels of 0..255 in float32. No sum depends on an order, so ranks and batches change no bit."""
    mean = pictures.sum((2, 3)).float() / pictures[0, 0].numel()  # (B, 3), of whole numbers
    coefficients = draws[:, :, :, None, None]  # (B, 4, 3, 1, 1)
    red, green, blue = pictures.float().split(1, 1)
    pixel: Tensor = coefficients[:, :3, 0] * red + coefficients[:, :3, 1] * green + coefficients[:, :3, 2] * blue
    shift = draws[:, 3, 0] * mean[:, 0] + draws[:, 3, 1] * mean[:, 1] + draws[:, 3, 2] * mean[:, 2]
    return (pixel + shift[:, None, None, None]).clamp_(0, 255)
