"""The mathematics of `latent` against slow, obvious references: discriminant, logistic regression, transition matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from scipy.optimize import minimize
from sklearn.decomposition import PCA

from pipeline.distributed.world import World
from pipeline.methods.parts import discriminant, transition
from pipeline.methods.parts.discriminant import linear_discriminant
from pipeline.methods.parts.logistic_regression import BALANCE, logistic_regression, minimise
from pipeline.methods.parts.principal_components import principal_components
from pipeline.methods.parts.transition import Noise, fit_noise, transition_matrix

K, D, N = 4, 6, 90


def soft_sample(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(N, D)) + 3), torch.from_numpy(rng.dirichlet(np.full(K, 0.3), N))


# -- discriminant --------------------------------------------------------------------------------------------------


def slow_discriminant(x: np.ndarray, soft: np.ndarray) -> np.ndarray:
    """(N,K) scores, sample by sample: minus half of the squared distance, less what a noisy mean adds to it."""
    count = soft.sum(0)
    raw = [sum(q * row for q, row in zip(soft[:, k], x)) / count[k] for k in range(K)]
    centre = np.mean(raw, 0)
    mean = [(count[k] * raw[k] + centre) / (count[k] + 1) for k in range(K)]
    within = sum(soft[i, k] * np.outer(x[i] - raw[k], x[i] - raw[k]) for i in range(N) for k in range(K)) / N
    shrunken = 0.5 * within + 0.5 * np.trace(within) / D * np.eye(D)
    inverse = np.linalg.inv(shrunken)
    out = np.zeros((N, K))
    for i in range(N):
        for k in range(K):
            distance = (x[i] - mean[k]) @ inverse @ (x[i] - mean[k])
            excess = np.trace(inverse @ within) * min(count[k], (soft[:, k] ** 2).sum()) / (count[k] + 1) ** 2
            out[i, k] = -0.5 * (distance - excess)
    return out


def test_the_discriminant_is_the_formula() -> None:
    x, soft = soft_sample()
    assert (discriminant.SHRINKAGE, discriminant.PSEUDO) == (0.5, 1.0)
    found, expected = linear_discriminant(x, soft, World())(x).numpy(), slow_discriminant(x.numpy(), soft.numpy())
    # Up to what all classes have in common, the square of x.
    assert np.allclose(found - found[:, :1], expected - expected[:, :1], atol=1e-9)


def test_the_mean_of_a_small_class_costs_it_nothing() -> None:
    """Two classes of one distribution, one a hundred times as large: both must win equally often on new samples."""
    rng = np.random.default_rng(0)
    wins = []
    for _ in range(40):
        x = torch.from_numpy(rng.normal(size=(505, 30)))
        soft = torch.zeros(505, 2, dtype=torch.float64)
        soft[:500, 0], soft[500:, 1] = 1, 1
        score = linear_discriminant(x, soft, World())(torch.from_numpy(rng.normal(size=(200, 30))))
        wins.append(float((score[:, 1] > score[:, 0]).double().mean()))
    assert 0.4 < np.mean(wins) < 0.6


@pytest.mark.parametrize("samples", [0, 1, 5])
def test_equal_features_and_empty_classes_give_finite_scores(samples: int) -> None:
    x, soft = torch.ones(samples, D), torch.eye(3)[[0] * samples].view(samples, 3)
    for fit in (linear_discriminant, logistic_regression):
        model = fit(x, soft, World())
        assert torch.isfinite(model.weight).all()
        assert torch.isfinite(model.bias).all()


# -- logistic regression -------------------------------------------------------------------------------------------


def test_logistic_regression_is_the_minimum_of_its_loss() -> None:
    x, soft = soft_sample(1)
    model = logistic_regression(x, soft, World(), penalty=0.7)
    scale = 1 / float(x.norm(dim=1).mean())
    rows, count = scale * x.numpy(), soft.sum(0).numpy()
    weight = (N / (K * count)) ** BALANCE

    def loss(parameters: np.ndarray) -> float:
        table = parameters.reshape(K, D + 1)
        total = 0.35 * (table[:, :-1] ** 2).sum()
        for row, q in zip(rows, soft.numpy()):
            logits = table[:, :-1] @ row + table[:, -1] + BALANCE * np.log(count)
            total -= (weight * q * (logits - np.log(np.exp(logits).sum()))).sum()
        return float(total)

    best = minimize(loss, np.zeros(K * (D + 1)), method="BFGS", options={"gtol": 1e-5})
    found = torch.cat([model.weight / scale, model.bias[:, None]], 1).numpy()
    assert loss(found.ravel()) == pytest.approx(best.fun, rel=1e-6)


def test_lbfgs_reaches_the_minimum_of_a_stretched_bowl_and_stays_there() -> None:
    scale, goal = torch.logspace(0, 3, 8, dtype=torch.float64), torch.arange(8.0, dtype=torch.float64)

    def bowl(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return 0.5 * (scale * (x - goal) ** 2).sum(), scale * (x - goal)

    assert torch.allclose(minimise(bowl, torch.zeros_like(goal), 60), goal, atol=1e-5)
    assert torch.equal(minimise(bowl, goal, 60), goal)


# -- transition matrix ---------------------------------------------------------------------------------------------


def slow_transition(joint: np.ndarray) -> np.ndarray:
    """Row by row: the share of right labels and the distribution of wrong ones, both drawn towards those of all classes."""
    wrong = [[joint[k, j] if j != k else 0.0 for j in range(K)] for k in range(K)]
    total = np.sum(wrong)
    share = (total + 1) / (joint.sum() + 2)
    column = [sum(wrong[k][j] for k in range(K)) + transition.FLAT * (total + 1) / K for j in range(K)]
    out = np.zeros((K, K))
    for k in range(K):
        out[k, k] = (joint[k, k] + transition.RIGHT_PRIOR * (1 - share)) / (joint[k].sum() + transition.RIGHT_PRIOR)
        others = sum(column[j] for j in range(K) if j != k)
        for j in range(K):
            if j != k:
                part = wrong[k][j] + transition.WRONG_PRIOR * column[j] / others
                out[k, j] = (1 - out[k, k]) * part / (sum(wrong[k]) + transition.WRONG_PRIOR)
    return out


def test_the_transition_matrix_is_the_formula_and_its_rows_are_distributions() -> None:
    joint = np.random.default_rng(2).gamma(1.0, 10.0, (K, K))
    joint[2] = 0  # a class without samples
    found = transition_matrix(torch.from_numpy(joint)).numpy()
    assert np.allclose(found, slow_transition(joint), atol=1e-12)
    assert np.allclose(found.sum(1), 1)
    assert (found > 0).all()


def mixture(samples: int, seed: int = 0) -> tuple[np.ndarray, torch.Tensor, torch.Tensor, np.ndarray]:
    """True classes, exact log p(x | class) times three, given labels, and the transition matrix they come from."""
    rng = np.random.default_rng(seed)
    prior, centre = np.array([0.5, 0.3, 0.2]), np.array([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]])
    matrix = np.array([[0.7, 0.3, 0.0], [0.1, 0.8, 0.1], [0.0, 0.4, 0.6]])
    true = rng.choice(3, samples, p=prior)
    x = centre[true] + rng.normal(size=(samples, 2))
    scores = -0.5 * ((x[:, None] - centre) ** 2).sum(2)
    given = np.array([rng.choice(3, p=matrix[k]) for k in true])
    return true, torch.from_numpy(3 * scores), torch.from_numpy(given), matrix


def test_em_finds_the_transition_matrix_the_temperature_and_calibrated_posteriors() -> None:
    true, scores, given, matrix = mixture(6000)
    noise = fit_noise(scores, given, World())
    assert noise.temperature == pytest.approx(3, rel=0.15)
    assert np.abs(noise.transition.numpy() - matrix).max() < 0.05
    posterior = noise.posterior(scores, given).numpy()
    assert posterior.mean(0).tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.03)
    assert np.allclose(posterior.sum(1), 1)
    right = posterior[np.arange(len(true)), given.numpy()]
    for low, high in ((0.05, 0.35), (0.35, 0.65), (0.65, 0.95)):
        rows = (right >= low) & (right < high)
        assert rows.sum() > 50
        assert right[rows].mean() == pytest.approx((given.numpy() == true)[rows].mean(), abs=0.06)


def test_a_class_that_scores_favour_is_no_large_class_with_many_wrong_labels() -> None:
    """Twenty classes of about 25 samples, of exact scores and of scores to which each class adds a number of its own."""
    rng, classes = np.random.default_rng(0), 20
    centre, true = 2 * rng.normal(size=(classes, 6)), rng.integers(0, classes, 500)
    x, wrong = centre[true] + rng.normal(size=(500, 6)), rng.random(500) < 0.3
    scores = torch.from_numpy(-0.5 * ((x[:, None] - centre) ** 2).sum(2))
    given = torch.from_numpy(np.where(wrong, (true + rng.integers(1, classes, 500)) % classes, true))
    favour = torch.from_numpy(rng.normal(size=classes))
    for strength in (0, 2):
        biased = scores + strength * favour
        posterior = fit_noise(biased, given, World()).posterior(biased, given)
        estimated = 1 - float(posterior.gather(1, given[:, None]).mean())
        assert estimated == pytest.approx(wrong.mean(), abs=0.04)
        assert float((posterior.argmax(1).numpy() == true).mean()) > 0.93


def test_em_ends_at_a_fixed_point() -> None:
    """Estimates that are made again from their own posteriors stay what they are."""
    _, scores, given, _ = mixture(1500)
    noise = fit_noise(scores, given, World())
    posterior = noise.posterior(scores, given).numpy()
    joint = np.zeros((3, 3))
    for label, row in zip(given.tolist(), posterior):
        joint[:, label] += row
    again = transition_matrix(torch.from_numpy(joint))
    assert torch.allclose(again, noise.transition, atol=0.01)


def test_the_posterior_is_bayes_rule() -> None:
    prior, matrix = torch.tensor([0.7, 0.3]).double(), torch.tensor([[0.9, 0.1], [0.2, 0.8]]).double()
    noise, scores = Noise(prior, matrix, 2.0), torch.tensor([[1.0, 3.0]]).double()
    weight = [0.7 * np.exp(0.5), 0.3 * np.exp(1.5)]
    likely = [weight[0] * 0.1, weight[1] * 0.8]
    given = torch.tensor([1])
    assert noise.posterior(scores, given)[0].tolist() == pytest.approx(np.array(likely) / sum(likely))
    assert float(noise.predictive(scores, given)[0]) == pytest.approx(sum(likely) / sum(weight))


# -- ranks ---------------------------------------------------------------------------------------------------------


def parts_on(world: World) -> dict[str, Any]:
    x, soft = soft_sample(3)
    _, scores, given, _ = mixture(N)
    own = world.rank_slice(N)
    noise = fit_noise(scores[own], given[own], world)
    mean, basis = principal_components(x[own], 3, world)
    models = [fit(x[own], soft[own], world) for fit in (linear_discriminant, logistic_regression)]
    return {
        "noise": noise.transition, "temperature": torch.tensor(noise.temperature), "mean": mean, "space": basis @ basis.T,
        "weights": torch.stack([model.weight for model in models]),
    }  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_compute_what_one_computes(size: int) -> None:
    alone, ranks = parts_on(World()), on_ranks(size, parts_on)
    for name, value in alone.items():
        assert all(torch.equal(rank[name], ranks[0][name]) for rank in ranks), name
        assert torch.allclose(ranks[0][name], value, atol=1e-7), name


def test_principal_components_are_those_of_scikit_learn() -> None:
    x, _ = soft_sample()
    mean, basis = principal_components(x, 3, World())
    reference = PCA(3).fit(x.numpy())
    assert np.allclose(mean, reference.mean_)
    assert np.allclose(basis @ basis.T, reference.components_.T @ reference.components_)
    assert principal_components(x[:3], 99, World())[1].shape == (D, 2)
