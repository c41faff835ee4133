"""Mixing partners: a permutation inside groups, the same however the batch is cut."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.methods.parts.mixup import mix, pair_within


def rank_in_batch(views: int, samples: int) -> torch.Tensor:
    """Views stacked one after the other."""
    return torch.arange(views * samples).view(views, samples)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 8), st.integers(1, 3))
def test_partners_are_a_permutation_inside_each_group(seed, groups, size, views) -> None:
    """And nobody meets a view of its own sample, unless it is alone."""
    group, sample = torch.arange(groups).repeat_interleave(size), torch.arange(groups * size)
    partner = pair_within(group, sample * 7, rank_in_batch(views, len(sample)), seed)
    assert sorted(partner.tolist()) == list(range(views * groups * size))
    assert torch.equal(group.repeat(views)[partner], group.repeat(views))
    assert bool((sample.repeat(views)[partner] == sample.repeat(views)).any()) == (size == 1)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 5))
def test_the_same_pairs_arise_when_groups_are_spread_over_ranks(seed, cut) -> None:
    group = torch.arange(6).repeat_interleave(4)
    key = torch.randperm(1000)[:24]

    def met(part: slice) -> torch.Tensor:
        """(2, samples) sample and view that each row meets."""
        keys, views = key[part], torch.arange(2).repeat_interleave(len(key[part]))
        partner = pair_within(group[part], keys, rank_in_batch(2, len(keys)), seed)
        return (2 * keys.repeat(2) + views)[partner].view(2, -1)

    assert torch.equal(met(slice(0, 24)), torch.cat([met(slice(0, 4 * cut)), met(slice(4 * cut, 24))], 1))


def test_partners_differ_from_seed_to_seed_and_are_spread_evenly() -> None:
    """Every other sample of the group, and either of its views, equally often."""
    group, draws = torch.zeros(4, dtype=torch.long), 3000
    seen, both = torch.zeros(8, 8), 0
    for seed in range(draws):
        partner = pair_within(group, torch.arange(4), rank_in_batch(2, 4), seed)
        seen[torch.arange(8), partner] += 1
        both += int(partner[0] % 4 == partner[4] % 4)
    own = torch.eye(4).repeat(2, 2)
    assert (seen / draws - (1 - own) / 6).abs().max() < 0.03
    assert abs(both / draws - 1 / 3) < 0.03  # the two views of a sample choose for themselves


def test_mixing_is_a_weighted_sum() -> None:
    x = torch.arange(6.0).view(3, 2)
    mixed = mix(x, torch.tensor([1, 2, 0]), 0.75)
    assert torch.allclose(mixed[0], 0.75 * x[0] + 0.25 * x[1])
    assert mix(x, torch.tensor([1, 2, 0]), 1.0) is x
