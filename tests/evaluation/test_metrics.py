"""The numbers people compare, against obvious versions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.evaluation.accuracy import _count, _summarise
from pipeline.evaluation.metrics import cleaning_metrics, detection, group_accuracies, roc_auc
from pipeline.methods.base import Beliefs
from shards.bias import class_groups

LONG_TAIL_100 = np.array([int(500 * (1 / 100) ** (k / 99)) for k in range(100)])


def test_groups_of_cifar100_lt() -> None:
    sizes = {name: int(member.sum()) for name, member in class_groups(LONG_TAIL_100).items()}
    assert sizes == {"many": 35, "medium": 35, "few": 30}
    edge = class_groups(np.array([101, 100, 20, 19]))
    assert [edge[name].tolist() for name in ("many", "medium", "few")] == [
        [True, False, False, False],
        [False, True, True, False],
        [False, False, False, True],
    ]


def test_group_accuracy_is_the_mean_over_classes_that_have_test_pictures() -> None:
    correct, total = np.array([9, 1, 0, 3]), np.array([10, 2, 0, 4])
    groups = class_groups(np.array([200, 200, 50, 5]))
    assert group_accuracies(correct, total, groups) == {"many": pytest.approx(70.0), "few": pytest.approx(75.0)}


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1))
def test_detection_counts(pairs) -> None:
    truth, guess = (np.array(column) for column in zip(*pairs))
    hit = sum(t and g for t, g in pairs)
    found = detection(truth, guess)
    if hit:
        assert found["precision"] == pytest.approx(hit / guess.sum())
        assert found["recall"] == pytest.approx(hit / truth.sum())
        assert found["f1"] == pytest.approx(2 * hit / (guess.sum() + truth.sum()))
    else:
        assert found["f1"] == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=40))
def test_area_under_the_curve_is_the_chance_of_the_right_order(pairs) -> None:
    yes = [s for t, s in pairs if t]
    no = [s for t, s in pairs if not t]
    truth, score = np.array([t for t, _ in pairs]), np.array([s for _, s in pairs], float)
    if not yes or not no:
        assert roc_auc(truth, score) is None
        return
    wins = sum((a > b) + 0.5 * (a == b) for a in yes for b in no)
    assert roc_auc(truth, score) == pytest.approx(wins / (len(yes) * len(no)))


def test_cleaning_is_judged_by_true_labels_and_grouped_by_given_ones() -> None:
    given_labels, true = np.array([0, 0, 0, 1, 1]), np.array([0, 1, 0, 1, 0])
    beliefs = Beliefs(
        weight=torch.tensor([1.0, 0.5, 0.5, 1.0, 0.0]),
        label=torch.tensor([0, 1, 0, 1, 1]),
        clean=torch.tensor([True, False, False, True, True]),
        score=torch.tensor([0.9, 0.1, 0.2, 0.8, 0.7]),
        basis=(torch.tensor([0, 0, 0, 1, 1]), torch.ones(5)),
    )
    groups = {"many": np.array([True, False]), "few": np.array([False, True])}
    found = cleaning_metrics(beliefs, given_labels, true, groups)
    assert found["clean/precision"] == pytest.approx(2 / 3)
    assert found["clean/recall"] == pytest.approx(2 / 3)
    assert found["noisy/precision"] == pytest.approx(1 / 2)
    assert found["clean/f1_few"] == pytest.approx(2 / 3)
    assert found["clean/noise_before"] == pytest.approx(2 / 5)
    assert found["clean/noise_after"] == pytest.approx(1 / 5)
    assert found["clean/relabel_accuracy"] == 1.0
    assert found["clean/relabelled"] == pytest.approx(1 / 5)
    assert found["clean/doubtful"] == pytest.approx(1 / 5)
    assert found["prototype/purity"] == pytest.approx(3 / 5)
    assert found["clean/auc"] == pytest.approx(5 / 6)


def test_without_true_labels_only_what_can_be_known_is_reported() -> None:
    beliefs = Beliefs(clean=torch.tensor([True, False]), label=torch.tensor([0, 0]))
    found = cleaning_metrics(beliefs, np.array([0, 1]), np.array([-1, -1]), class_groups(np.array([1, 1])))
    assert found["clean/share"] == 0.5
    assert "clean/f1" not in found


def test_evaluation_counts_in_any_order_of_batches() -> None:
    torch.manual_seed(0)
    score, label = torch.randn(50, 7), torch.randint(0, 7, (50,))
    whole, parts = (torch.zeros(7, 10, dtype=torch.float64) for _ in range(2))
    _count(whole, score, label)
    for rows in torch.randperm(50).split(9):
        _count(parts, score[rows], label[rows])
    assert torch.allclose(whole, parts)
    found = _summarise("imagenet", {"a": whole.numpy(), "b": whole.numpy()}, class_groups(np.full(7, 200)))
    top1 = float((score.argmax(1) == label).double().mean() * 100)
    top5 = float((score.topk(5, 1).indices == label[:, None]).any(1).double().mean() * 100)
    assert found.metrics["imagenet/top1"] == pytest.approx(top1)
    assert found.metrics["imagenet/top5"] == pytest.approx(top5)
    assert np.allclose(found.marginal["a"], score.double().softmax(1).mean(0).numpy())
    assert found.confusion.sum() == 50
    assert set(found.metrics) == {
        "imagenet/top1", "imagenet/top5", "imagenet/many", "imagenet/a/marginal_kl",
        "imagenet/b/top1", "imagenet/b/top5", "imagenet/b/marginal_kl",
    }  # fmt: skip
