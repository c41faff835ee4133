"""The order of samples: nothing lost or repeated, the same for any number of ranks and after any break."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data import sampling

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda s: sum(s) > 0)


@given(sizes, st.integers(0, 5), st.integers(0, 3), st.integers(0, 4))
def test_a_shuffle_holds_every_sample_once(shards, seed, order_key, window):
    n = sum(shards)
    order = sampling.shuffled(n, seed, order_key, 0, None, shards, window)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(n))


@given(sizes, st.integers(0, 4), st.data())
def test_a_shuffled_subset_holds_the_subset_once(shards, window, data):
    n = sum(shards)
    subset = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1)))), np.int64)
    order = sampling.shuffled(n, 0, 0, 0, subset, shards, window)
    assert sorted(order) == list(subset)


def test_seed_tick_and_stream_each_change_the_order_and_nothing_else_does():
    base = sampling.shuffled(500, 1, 2, 3)
    assert (base == sampling.shuffled(500, 1, 2, 3)).all()
    for other in (sampling.shuffled(500, 2, 2, 3), sampling.shuffled(500, 1, 3, 3), sampling.shuffled(500, 1, 2, 4)):
        assert (base != other).any()


def test_a_window_bounds_how_many_shards_are_open():
    shards, window = [10] * 20, 3
    order = sampling.shuffled(200, 0, 0, 0, None, shards, window)
    shard_of = order // 10
    for first in range(0, 200, 10 * window):
        assert len(set(shard_of[first : first + 10 * window])) <= window
    assert len(set(shard_of[:8])) > 1, "samples inside a window must be mixed"


def test_a_window_over_wrong_shard_sizes_is_refused():
    with pytest.raises(ValueError, match="shards hold 7"):
        sampling.shuffled(8, 0, 0, 0, None, [3, 4], 1)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, 200))
def test_a_balanced_order_shows_every_class_equally_often(labels, length):
    given_labels = np.array(labels, np.int32)
    order = sampling.balanced(given_labels, 8, 0, 0, length)
    assert len(order) == length
    present = len(set(labels))
    counts = np.bincount(given_labels[order], minlength=8) if length else np.zeros(8, int)
    shown = counts[sorted(set(labels))]
    assert shown.max(initial=0) - shown.min(initial=length) <= 1
    assert shown.sum() == length
    for first in range(0, length - present + 1, present):  # every round holds each class once
        assert len(set(given_labels[order[first : first + present]])) == present


@given(st.integers(1, 9), st.integers(1, 5))
def test_a_balanced_order_shows_all_members_before_one_comes_again(members, cycles):
    order = sampling.balanced(np.zeros(members, np.int32), 1, 0, 0, members * cycles)
    for first in range(0, len(order), members):
        assert sorted(order[first : first + members]) == list(range(members))


@given(st.lists(st.integers(0, 5), max_size=40))
def test_occurrence_counts_how_often_a_sample_came_before(order):
    seen: dict[int, int] = {}
    expected = []
    for index in order:
        expected.append(seen.get(index, 0))
        seen[index] = expected[-1] + 1
    assert sampling.occurrence(np.array(order, np.int64)).tolist() == expected


walks = {
    "n": st.integers(1, 150),
    "batch": st.integers(1, 40),
    "group": st.integers(1, 12),
    "parts": st.integers(1, 5),
}


def rows_of(order: np.ndarray, batch: int, group: int, parts: int, rank: int, world: int, first_step: int = 0):
    """What one rank sees: (step, group number of each row, samples) of each micro-batch."""
    for step in range(first_step, sampling.steps(len(order), batch)):
        rows = order[sampling.batch_rows(len(order), batch, step)]
        for micro in sampling.micro_slices(len(rows), parts, group):
            mine = sampling.rank_rows(micro.stop - micro.start, rank, world, group)
            place = np.arange(micro.start + mine.start, micro.start + mine.stop)
            yield step, place // group, rows[place]


@settings(max_examples=200)
@given(**walks, world=st.integers(1, 9))
def test_ranks_together_see_the_global_sequence_whatever_their_number(n, batch, group, parts, world):
    order = sampling.shuffled(n, 0, 0)
    ranks = [list(rows_of(order, batch, group, parts, rank, world)) for rank in range(world)]
    alone = list(rows_of(order, batch, group, parts, 0, 1))
    assert {len(r) for r in ranks} == {len(alone)}, "every rank makes the same number of micro-steps"
    together = [np.concatenate([rank[i][2] for rank in ranks]) for i in range(len(alone))]
    assert all((a == b[2]).all() for a, b in zip(together, alone))
    assert (np.concatenate(together) == order).all(), "nothing lost, nothing repeated"


@settings(max_examples=200)
@given(**walks, world=st.integers(1, 9))
def test_a_mixing_group_lives_on_one_rank_and_in_one_micro_batch(n, batch, group, parts, world):
    order = np.arange(n)
    owner: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for rank in range(world):
        for i, (step, groups, _) in enumerate(rows_of(order, batch, group, parts, rank, world)):
            for g in groups:
                owner.setdefault((step, int(g)), set()).add((rank, i))
    assert all(len(owners) == 1 for owners in owner.values())


@given(**walks, world=st.integers(1, 5), data=st.data())
def test_resuming_at_any_step_yields_the_same_remainder(n, batch, group, parts, world, data):
    order = sampling.shuffled(n, 3, 7)
    step = data.draw(st.integers(0, sampling.steps(n, batch)))
    whole = [x for x in rows_of(order, batch, group, parts, 0, world) if x[0] >= step]
    rest = list(rows_of(order, batch, group, parts, 0, world, step))
    assert len(whole) == len(rest)
    assert all(a[0] == b[0] and (a[2] == b[2]).all() for a, b in zip(whole, rest))


@given(**walks)
def test_no_micro_batch_is_empty(n, batch, group, parts):
    for rows in sampling.micro_slices(n, parts, group):
        assert rows.stop > rows.start
