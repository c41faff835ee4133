"""AugMix on batches: each operation is Pillow's, byte for byte, and the mixture follows the published law."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from pipeline.data import augment
from pipeline.data.augment import DRAWS, OPERATIONS, augmix, draw_augmix, normalise
from pipeline.data.keyed_random import uniform

# Compilers may fuse multiply and add on other processors, which moves a value across a level now and then.
SLACK = 0 if platform.machine() in ("x86_64", "AMD64") else 1


def pictures(n: int, size: int) -> np.ndarray:
    """(n, size, size, 3): noise, smooth ramps, few levels, dark, flat and half-flat pictures."""
    rng = np.random.default_rng(size)
    out = rng.integers(0, 256, (n, size, size, 3), dtype=np.uint8)
    ramp = np.linspace(20, 200, size).astype(np.uint8)
    out[1::6] = ramp[:, None, None] // np.array([1, 2, 3], np.uint8)
    out[2::6] = out[2::6] // 64 * 64
    out[3::6] = out[3::6] // 9
    out[4::6] = rng.integers(0, 256, (len(out[4::6]), 1, 1, 3))
    out[5::6, : size // 2] = 255
    return out


def by_pillow(name: str, picture: np.ndarray, parameter: float | np.ndarray) -> np.ndarray:
    """The obvious way: one picture, Pillow's own function."""
    image = Image.fromarray(picture)
    if name in ("shear_x", "shear_y", "translate_x", "translate_y"):
        image = image.transform(image.size, Image.Transform.AFFINE, list(parameter), resample=Image.Resampling.BILINEAR)
    elif name == "rotate":
        image = image.rotate(float(parameter), resample=Image.Resampling.BILINEAR)
    elif name == "posterize":
        image = ImageOps.posterize(image, int(parameter))
    elif name == "solarize":
        image = ImageOps.solarize(image, int(parameter))
    elif name in ("autocontrast", "equalize"):
        image = getattr(ImageOps, name)(image)
    else:
        image = getattr(ImageEnhance, {"colour": "Color"}.get(name, name.capitalize()))(image).enhance(float(parameter))
    return np.asarray(image)


def batched(name: str, batch: np.ndarray, parameter: np.ndarray) -> np.ndarray:
    out = OPERATIONS[name].apply(torch.from_numpy(batch).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(parameter))
    assert out.dtype == torch.uint8
    return out.permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("size", [16, 75])
@pytest.mark.parametrize("severity", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_gives_pillows_bytes(name, severity, size):
    batch = pictures(48, size)
    rng = np.random.default_rng(1)
    level = rng.uniform(0.1, severity, len(batch))
    sign = rng.choice([-1.0, 1.0], len(batch))
    parameter = OPERATIONS[name].parameter(level, sign, size)
    asked = sign * np.trunc(level * 3) if name == "rotate" else parameter
    expected = np.stack([by_pillow(name, picture, p) for picture, p in zip(batch, asked)])
    difference = np.abs(batched(name, batch, parameter).astype(int) - expected)
    assert difference.max() <= SLACK


def test_magnitudes_are_those_of_the_specification():
    level = np.array([1.0, 0.1, 0.99])
    plus = np.ones(3)
    at = {name: operation.parameter(level, plus, 32) for name, operation in OPERATIONS.items()}
    assert at["posterize"].tolist() == [4, 4, 4], "always four bits at severity 1"
    assert at["solarize"].tolist() == [231, 254, 231]
    assert at["shear_x"][:, 1].tolist() == pytest.approx([0.03, 0.003, 0.0297])
    assert at["translate_y"][:, 5].tolist() == [1, 0, 1]
    assert at["brightness"].tolist() == pytest.approx([0.28, 0.118, 0.2782])
    assert OPERATIONS["translate_x"].parameter(level, -plus, 299)[:, 2].tolist() == [-9, 0, -9]
    assert len(OPERATIONS) == 13


def slow_augmix(picture: np.ndarray, rng: np.random.Generator, variant: str, severity: float, norm) -> np.ndarray:
    """AugMix for one Pillow picture, written down from its description; returns the normalised mixture."""
    size = picture.shape[0]
    weights = rng.dirichlet([1.0, 1.0, 1.0])
    blend = rng.beta(1.0, 1.0)
    chains = []
    for _ in range(3):
        current = picture
        for _ in range(rng.integers(1, 4)):
            name = list(OPERATIONS)[rng.integers(13)]
            level, sign = rng.uniform(0.1, severity), rng.choice([-1, 1])
            parameter: float | list[float] = {
                "autocontrast": 0,
                "equalize": 0,
                "posterize": 4 - int(level * 4 / 10),
                "rotate": sign * int(level * 30 / 10),
                "solarize": 256 - int(level * 256 / 10),
                "shear_x": [1, sign * level * 0.3 / 10, 0, 0, 1, 0],
                "shear_y": [1, 0, 0, sign * level * 0.3 / 10, 1, 0],
                "translate_x": [1, 0, sign * int(level * (size / 3) / 10), 0, 1, 0],
                "translate_y": [1, 0, 0, 0, 1, sign * int(level * (size / 3) / 10)],
            }.get(name, level * 1.8 / 10 + 0.1)
            current = by_pillow(name, current, parameter)
        chains.append(norm(current))
    if variant == "released":
        mixture = weights[2] * chains[2]
    else:
        mixture = sum(w * chain for w, chain in zip(weights, chains))
    return (1 - blend) * norm(picture) + blend * mixture


MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def fast_augmix(picture: np.ndarray, draws: np.ndarray, variant: str, severity: float) -> np.ndarray:
    batch = torch.from_numpy(picture).permute(2, 0, 1).expand(len(draws), -1, -1, -1).contiguous()
    mixture, total = augmix(batch, draw_augmix(draws, picture.shape[0], variant, severity))
    return normalise(mixture, MEAN, STD, total).permute(0, 2, 3, 1).double().numpy()


@pytest.mark.parametrize(("variant", "severity"), [("released", 1.0), ("original", 3.0)])
def test_the_distribution_is_that_of_a_plain_implementation(variant, severity):
    rng = np.random.default_rng(0)
    ramp = np.linspace(0, 255, 16)
    picture = np.stack([ramp[:, None] + 0 * ramp, 0 * ramp[:, None] + ramp, 255 - ramp[:, None] + 0 * ramp], -1)
    picture = np.clip(picture * 0.7 + rng.integers(0, 60, picture.shape), 0, 255).astype(np.uint8)

    def norm(x: np.ndarray) -> np.ndarray:
        return (x / 255 - np.array(MEAN)) / np.array(STD)

    n = 2000
    slow = np.stack([slow_augmix(picture, rng, variant, severity, norm) for _ in range(n)])
    fast = fast_augmix(picture, uniform((7, 7, 7), np.arange(2 * n), DRAWS), variant, severity)
    error = np.sqrt(slow.var(0) / n + fast.var(0) / len(fast)) + 1e-9
    assert np.abs((slow.mean(0) - fast.mean(0)) / error).max() < 5.5  # 768 pixels
    assert np.allclose(slow.std(0).mean(), fast.std(0).mean(), rtol=0.08)
    assert np.allclose(slow.mean((1, 2, 3)).std(), fast.mean((1, 2, 3)).std(), rtol=0.08)


def test_the_released_reading_shrinks_towards_the_mean_by_a_third_on_average():
    draws = uniform((1, 1, 1), np.arange(20_000), DRAWS)
    released = draw_augmix(draws, 16, "released", 1.0).coefficients
    original = draw_augmix(draws, 16, "original", 1.0).coefficients
    assert released.shape == (20_000, 2)
    assert original.shape == (20_000, 4)
    assert released.sum(1).mean().item() == pytest.approx(2 / 3, abs=0.01)  # 1 - m (1 - w3), on average 1 - 1/2 * 2/3
    assert torch.allclose(original.sum(1), torch.ones(20_000), atol=1e-6)
    assert torch.allclose(original[:, 1:].mean(0), torch.full((3,), 1 / 6), atol=0.005)


def test_every_operation_and_every_chain_length_is_drawn_equally_often():
    draws = uniform((2, 1, 1), np.arange(30_000), DRAWS)
    todo = draw_augmix(draws, 16, "released", 1.0)
    (chain,) = todo.chains
    touched = torch.zeros(30_000, dtype=torch.long)
    by_kind: dict[str, int] = {}
    for apply, part in chain:
        touched[todo.rows[part]] += 1
        by_kind[apply.__name__] = by_kind.get(apply.__name__, 0) + len(todo.rows[part])
    assert np.allclose(np.bincount(touched)[1:] / 30_000, 1 / 3, atol=0.012)
    total = sum(by_kind.values())
    assert by_kind.pop("affine") / total == pytest.approx(5 / 13, abs=0.01)
    assert all(count / total == pytest.approx(1 / 13, abs=0.005) for count in by_kind.values())
    assert len(by_kind) == 8


@pytest.mark.parametrize("variant", ["released", "original"])
def test_a_sample_comes_out_the_same_in_any_company(variant):
    batch = torch.from_numpy(pictures(24, 16)).permute(0, 3, 1, 2).contiguous()
    draws = uniform((3, 1, 1), np.arange(24), DRAWS)
    whole, _ = augmix(batch, draw_augmix(draws, 16, variant, 3.0))
    for rows in (slice(0, 5), slice(5, 6), slice(6, 24)):
        part, _ = augmix(batch[rows], draw_augmix(draws[rows], 16, variant, 3.0))
        assert torch.equal(part, whole[rows])


def test_normalising_a_mixture_is_mixing_normalised_pictures():
    a, b = torch.randint(0, 256, (2, 4, 3, 8, 8), generator=torch.Generator().manual_seed(0)).float()
    together = normalise(0.3 * a + 0.5 * b, MEAN, STD, torch.full((4,), 0.8))
    apart = 0.3 * normalise(a, MEAN, STD) + 0.5 * normalise(b, MEAN, STD)
    assert torch.allclose(together, apart, atol=1e-5)


def test_a_plan_moves_to_a_device_whole():
    todo = draw_augmix(uniform((0,), np.arange(8), DRAWS), 16, "original", 1.0).to(lambda t: t.to("meta"))
    mixture, total = augmix(torch.zeros(8, 3, 16, 16, dtype=torch.uint8, device="meta"), todo)
    assert mixture.is_meta
    assert total.is_meta
    assert len(todo.chains) == augment.CHAINS


def test_no_samples_make_an_empty_mixture():
    mixture, total = augmix(
        torch.zeros(0, 3, 16, 16, dtype=torch.uint8), draw_augmix(np.zeros((0, DRAWS)), 16, "released", 1.0)
    )
    assert mixture.shape == (0, 3, 16, 16)
    assert total.shape == (0,)
