"""Mixing partners: a permutation inside groups, the same however the batch is cut."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.mixing import mix, pair_within


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 8))
def test_partners_are_a_permutation_inside_each_group(seed, groups, size) -> None:
    group = torch.arange(groups).repeat_interleave(size)
    partner = pair_within(group, torch.arange(groups * size) * 7, seed)
    assert sorted(partner.tolist()) == list(range(groups * size))
    assert torch.equal(group[partner], group)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5))
def test_the_same_pairs_arise_when_groups_are_spread_over_ranks(seed, cut) -> None:
    group = torch.arange(6).repeat_interleave(4)
    key = torch.randperm(1000)[:24]
    whole = key[pair_within(group, key, seed)]
    parts = [slice(0, 4 * cut), slice(4 * cut, 24)]
    apart = torch.cat([key[p][pair_within(group[p], key[p], seed)] for p in parts])
    assert torch.equal(whole, apart)


def test_partners_differ_from_seed_to_seed_and_are_spread_evenly() -> None:
    group = torch.zeros(4, dtype=torch.long)
    seen = torch.zeros(4, 4)
    for seed in range(2000):
        seen[torch.arange(4), pair_within(group, torch.arange(4), seed)] += 1
    assert (seen / 2000 - 0.25).abs().max() < 0.05


def test_mixing_is_a_weighted_sum() -> None:
    x = torch.arange(6.0).view(3, 2)
    mixed = mix(x, torch.tensor([1, 2, 0]), 0.75)
    assert torch.allclose(mixed[0], 0.75 * x[0] + 0.25 * x[1])
    assert mix(x, torch.tensor([1, 2, 0]), 1.0) is x
