"""Evenhand: votes and prototypes without the own sample written the slow way, classes that nobody confirms, and its rules."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from rivals import Pictures, make_method, small_config, survey_of
from torch.nn.functional import normalize

from pipeline.methods.evenhand import Evenhand
from pipeline.methods.parts.survey import Survey

K, N, D = 3, 45, 8


def learner(given: np.ndarray | None = None, classes: int = K, **options: Any) -> Evenhand:
    settings = {"name": "evenhand", "neighbours": 6, "relabel_above": 0.7, **options}
    given = Pictures().given if given is None else given
    method = make_method(small_config(settings), given, classes)
    assert isinstance(method, Evenhand)
    return method.double()


def surveyed(seed: int, given: np.ndarray, width: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    probability = torch.from_numpy(3 * rng.normal(size=(len(given), K))).softmax(1)
    sureness, likeliest = probability.max(1)
    confidence = probability[torch.arange(len(given)), torch.from_numpy(given).long()]
    z = normalize(torch.from_numpy(rng.normal(size=(len(given), width))), dim=1)
    return {"z": z, "sureness": sureness, "likeliest": likeliest, "confidence": confidence}


def slow_votes(z: torch.Tensor, label: list[int], k: int, bank: list[int]) -> list[list[float]]:
    """For each sample the votes of the k nearest others of the bank, over the sizes of the classes in it."""
    size, out = Counter(label[j] for j in bank), []
    for i in range(len(z)):
        near = sorted((j for j in bank if j != i), key=lambda j, i=i: -float(z[i] @ z[j]))[:k]
        out.append([sum(label[j] == c for j in near) / size[c] if size[c] else 0.0 for c in range(K)])
    return out


def slow_confirmed(z: torch.Tensor, label: list[int]) -> list[bool]:
    """Whether the mean of the others with the same label is the nearest of all class means."""
    out = []
    for i, own in enumerate(label):
        means = [
            sum((z[j] for j in range(len(z)) if label[j] == c and j != i), torch.zeros_like(z[0])) for c in range(K)
        ]
        cosine = [float(z[i] @ m) / max(float(m.norm()), 1e-12) for m in means]
        out.append(cosine[own] >= max(cosine) and bool(means[own].any()))
    return out


@pytest.mark.parametrize("bank", [1000, 12])
def test_labels_and_selection_are_those_of_the_slow_way(bank: int) -> None:
    method = learner(bank=bank)
    given = method.data.given
    for epoch in range(2):
        method.set_epoch(0, epoch)
        found = surveyed(epoch, given, method.network.features)
        survey = survey_of(found)
        own = [int(c) if p > 0.7 else int(y) for p, c, y in zip(found["sureness"], found["likeliest"], given)]
        place, z = method._bank(torch.tensor(own), survey)
        members = (place >= 0).nonzero()[:, 0].tolist()
        assert place[members].tolist() == list(range(len(members)))
        assert torch.equal(z, found["z"][members])
        method.begin_epoch(survey)
        votes = slow_votes(found["z"], own, 6, members)
        near = slow_confirmed(found["z"], own)
        voted = [v[y] >= max(v) - 1e-12 for v, y in zip(votes, own)]
        selected = [a or b for a, b in zip(voted, near)]
        assert sum(voted) < sum(selected) > sum(near)
        assert method.selected.tolist() == selected
        assert 0 < sum(selected) < N
        likeliest = found["likeliest"].tolist()
        assert method.label.tolist() == [y if s else c for s, y, c in zip(selected, own, likeliest)]
        assert method.support.tolist() == pytest.approx([v[y] / max(v) for v, y in zip(votes, given)], abs=1e-6)
        assert method.score.tolist() == pytest.approx(found["confidence"].tolist())
        clean = [s and y == g for s, y, g in zip(selected, own, given)]
        assert method.beliefs.clean.tolist() == clean


def test_a_bank_has_equally_many_of_every_class_or_all_there_are() -> None:
    given = np.array([0] * 30 + [1] * 10 + [2] * 2, np.int32)
    method = learner(given, bank=18)
    survey = survey_of(surveyed(0, given, method.network.features))
    place, _ = method._bank(torch.from_numpy(given), survey)
    assert np.bincount(given[(place >= 0).numpy()], minlength=K).tolist() == [6, 6, 2]
    assert (method.gathered_samples(), learner(given).gathered_samples()) == (18, 42)


def test_a_label_is_not_confirmed_by_its_own_sample() -> None:
    """Two tight groups of samples; the last sample stands in the first group and has the label of the second."""
    given = np.array([0] * 9 + [1] * 5, np.int32)
    method = learner(given, classes=2, neighbours=3)
    z = torch.zeros(14, method.network.features, dtype=torch.float64)
    z[:9, 0], z[9:13, 1], z[13, 0] = 1.0, 1.0, 1.0
    found = surveyed(0, given, method.network.features) | {"z": z, "sureness": torch.zeros(14, dtype=torch.float64)}
    method.begin_epoch(survey_of(found))
    assert method.selected[:13].all()
    assert not method.selected[13]
    assert method.support[13] == 0


def test_a_class_that_nobody_confirms_keeps_its_samples() -> None:
    given = np.array([0] * 8 + [1], np.int32)
    method = learner(given, classes=2, neighbours=3)
    found = surveyed(0, given, method.network.features) | {"sureness": torch.zeros(9)}
    method.begin_epoch(survey_of(found))
    assert method.selected[8]  # nobody else has its label
    assert method.label[8] == 1
    (pass_,) = method.passes()
    assert 8 in pass_.second


def test_prototypes_are_means_of_selected_samples_and_classify_besides() -> None:
    method = learner()
    found = surveyed(3, method.data.given, method.network.features)
    survey: Survey = survey_of(found)
    method.begin_epoch(survey)
    method.end_epoch(survey)
    for k in range(K):
        rows = (method.selected & (method.label == k)).nonzero()[:, 0].tolist()
        mean = sum(found["z"][i] for i in rows) / len(rows)
        assert torch.allclose(method.prototypes[k], mean / mean.norm(), atol=1e-6)
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    method.eval()
    with torch.no_grad():
        scores = method.scores(images)
        cosine = normalize(method.eval_network(images)[0], dim=1) @ method.prototypes.T
    assert list(scores) == ["linear", "prototype"]
    assert torch.allclose(scores["prototype"], cosine / 0.1, atol=1e-5)


def test_the_number_of_neighbours_follows_from_the_number_of_samples() -> None:
    assert learner(neighbours=None).neighbours == 6  # the root of 45
    assert learner(np.zeros(50_000, np.int32), neighbours=None).neighbours == 200
