"""Plans are pure, dense and stable: one unusable picture does not move the others."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from shards.base.errors import UserError
from shards.config import BuildConfig
from shards.plan import make_plan
from shards.sources import Collection, SourceTable


class Nothing:
    def read(self, split: str, row: int, key: str) -> bytes:
        raise AssertionError


def collection(counts: list[int]) -> Collection:
    labels = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    keys = pa.array([str(row) for row in range(len(labels))])
    splits = {"train": SourceTable(keys, labels, labels), "test": SourceTable(keys, labels, labels)}
    return Collection("made up", [str(k) for k in range(len(counts))], splits, Nothing())


@settings(max_examples=80, deadline=None)
@given(
    counts=st.lists(st.integers(4, 30), min_size=2, max_size=6),
    rho=st.sampled_from([1.0, 1.5, 3.0]),
    noise=st.sampled_from([0.0, 0.3]),
    tail=st.sampled_from(["natural", "sorted"]),
    share=st.floats(0, 0.2),
    seed=st.integers(0, 3),
)
def test_every_plan_is_dense_and_exact(counts, rho, noise, tail, share, seed) -> None:
    found = collection(counts)
    total = sum(counts)
    rng = np.random.default_rng(seed)
    bad = set(rng.choice(total, int(share * total), replace=False).tolist())
    left = np.bincount(np.delete(found.splits["train"].given, sorted(bad)), minlength=len(counts)).min()
    config = BuildConfig(rho=rho, noise=noise, tail=tail, bias_seed=seed)
    try:
        plan = make_plan(found, config, {"train": bad})["train"]
    except UserError:
        assert left == 0 or (tail == "natural" and left < rho)  # refused only if a class would be empty
        return
    assert len(set(plan.rows.tolist())) == len(plan)
    assert not bad & set(plan.rows.tolist())
    assert plan.flipped.sum() == int(noise * len(plan))
    assert np.array_equal(plan.flipped, plan.given != plan.true)
    assert np.array_equal(plan.true, found.splits["train"].given[plan.rows])
    assert np.array_equal(plan.clean_counts, np.bincount(plan.true, minlength=len(counts)))
    again = make_plan(found, config, {"train": bad})["train"]
    assert np.array_equal(plan.rows, again.rows)
    assert np.array_equal(plan.given, again.given)


def test_one_bad_picture_moves_at_most_the_last_one() -> None:
    found = collection([200, 200])
    config = BuildConfig(rho=1, noise=0)
    before = make_plan(found, config, {})["train"].rows
    for place in (0, 57, 399):
        after = make_plan(found, config, {"train": {int(before[place])}})["train"].rows
        assert len(after) == 399
        moved = np.flatnonzero(before[:399] != after)
        assert moved.tolist() == ([place] if place < 399 else [])
        assert place == 399 or after[place] == before[399]


def test_under_a_long_tail_another_picture_of_the_class_steps_in() -> None:
    found = collection([200, 200])
    config = BuildConfig(rho=4, noise=0)
    before = make_plan(found, config, {})["train"]
    bad = int(before.rows[before.true == 1][0])
    after = make_plan(found, config, {"train": {bad}})["train"]
    assert after.clean_counts.tolist() == [199, 49]  # what every class can still meet
    assert (before.rows[: len(after)] != after.rows).sum() <= 3


def test_noise_of_the_others_stays_when_one_falls_out() -> None:
    found = collection([200, 200])
    config = BuildConfig(rho=1, noise=0.4, noise_kind="symmetric")
    before = make_plan(found, config, {})["train"]
    after = make_plan(found, config, {"train": {int(before.rows[5])}})["train"]
    label = dict(zip(before.rows.tolist(), before.given.tolist()))
    changed = [row for row, given in zip(after.rows.tolist(), after.given.tolist()) if label[row] != given]
    assert len(changed) <= 1


def test_the_test_split_is_never_biased() -> None:
    found = collection([50, 50])
    plan = make_plan(found, BuildConfig(rho=10, noise=0.5), {})["test"]
    assert np.array_equal(plan.given, plan.true)
    assert len(plan) == 100
