"""The loader: the same batches for any number of ranks, threads and restarts, and nothing left behind."""

from __future__ import annotations

import io
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.config import DataConfig
from pipeline.data import sampling
from pipeline.data.batch import Batch, Pass
from pipeline.data.crops import center_crop
from pipeline.data.loader import Loader
from pipeline.distributed.world import World
from shards.base.errors import UserError
from shards.decode import decode
from shards.reader import open_split

N, SIZE = 37, 8


class Memory:
    """Encoded pictures in a list, with the surface of a split of shards."""

    def __init__(self, pictures: list[bytes], shard_sizes: tuple[int, ...]) -> None:
        self.pictures, self.shard_sizes = pictures, shard_sizes
        self.given = (np.arange(len(pictures)) % 5).astype(np.int32)
        self.told: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.pictures)

    def read(self, index: int) -> bytes:
        return self.pictures[index]

    def prefetch(self, shards: list[int]) -> None:
        self.told.append(list(shards))


def picture(index: int) -> bytes:
    """A picture that tells which sample it is: red is its index."""
    pixels = np.random.default_rng(index).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    pixels[..., 0] = index
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def split() -> Memory:
    return Memory([picture(i) for i in range(N)], (10, 10, 10, 7))


def config(**changes: object) -> DataConfig:
    settings = {"batch": 12, "size": SIZE, "mix_group": 4, "mean": (0, 0, 0), "std": (1, 1, 1)} | changes
    return DataConfig.model_validate(settings)


def collect(
    split: Memory,
    pass_: Pass,
    rank: int = 0,
    world: int = 1,
    first_step: int = 0,
    accumulate: int = 1,
    **changes,
):
    loader = Loader(split, config(**changes), 5, World(rank, world), accumulate)
    return list(loader.batches(pass_, 3, first_step))


def same(a: Batch, b: Batch) -> bool:
    equal = torch.equal(a.index, b.index) and torch.equal(a.label, b.label) and torch.equal(a.valid, b.valid)
    equal = equal and torch.equal(a.groups, b.groups) and a.key == b.key and a.views.keys() == b.views.keys()
    return equal and all(torch.equal(a.views[name], b.views[name]) for name in a.views)


WALK = Pass(sampling.shuffled(N, 5, 3), views=("weak", "weak2", "strong"))


def test_a_pass_holds_every_sample_once_with_its_label_and_its_picture(split):
    batches = collect(split, WALK, padding=0)
    real = torch.cat([b.valid for b in batches]).bool()
    assert torch.cat([b.index for b in batches])[real].tolist() == WALK.order.tolist()
    assert torch.cat([b.label for b in batches])[real].tolist() == (WALK.order % 5).tolist()
    for batch in batches:
        assert batch.views["weak"].shape == (len(batch.index), 3, SIZE, SIZE)
        assert batch.views["weak"].dtype == torch.float32
        assert torch.allclose(
            batch.views["weak"][:, 0] * 255, batch.index.float().view(-1, 1, 1).expand(-1, SIZE, SIZE)
        )
    assert [b.key for b in batches] == [(5, 3, step) for step in range(4)]


def test_a_lone_row_gets_a_stand_in_that_does_not_count(split):
    last = collect(split, WALK)[-1]
    assert last.index.tolist() == [WALK.order[-1]] * 2
    assert last.valid.tolist() == [1.0, 0.0]
    assert last.rows == (2,)


def test_views_of_one_sample_differ_and_change_with_the_epoch(split):
    first = collect(split, WALK)[0]
    assert not torch.equal(first.views["weak"], first.views["weak2"])
    assert not torch.equal(first.views["weak"], first.views["strong"])
    again = next(iter(Loader(split, config(), 5, World()).batches(WALK, 4)))
    assert torch.equal(first.index, again.index)
    assert not torch.equal(first.views["weak"], again.views["weak"])


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_any_number_of_ranks_sees_the_same_global_batches(split, world, accumulate):
    alone = collect(split, WALK, accumulate=accumulate)
    ranks = [collect(split, WALK, rank, world, accumulate=accumulate) for rank in range(world)]
    assert {len(batches) for batches in ranks} == {len(alone)}
    for step, whole in enumerate(alone):
        parts = [batches[step] for batches in ranks]
        real = [p.valid.bool() for p in parts]
        whole_real = whole.valid.bool()
        for get in (
            lambda b: b.index,
            lambda b: b.groups,
            lambda b: b.views["weak"],
            lambda b: b.views["strong"],
        ):
            together = torch.cat([get(p)[mask] for p, mask in zip(parts, real)])
            assert torch.equal(together, get(whole)[whole_real])
        assert all(p.rows == tuple(len(q.index) for q in parts) for p in parts), "every rank knows what the others hold"
        assert min(parts[0].rows) >= 2
        assert {(p.share, p.last, p.key) for p in parts} == {(whole.share, whole.last, whole.key)}


def test_stand_ins_never_share_a_group_with_a_real_row(split):
    for rank in range(5):
        for batch in collect(split, WALK, rank, 5):
            real = batch.valid.bool()
            assert not set(batch.groups[real].tolist()) & set(batch.groups[~real].tolist())


def test_micro_batches_make_up_the_global_batch(split):
    whole = collect(split, WALK)
    parts = collect(split, WALK, accumulate=3)
    for step, batch in enumerate(whole):
        mine = [p for p in parts if p.key[2] == step]
        real = torch.cat([p.index[p.valid.bool()] for p in mine])
        assert torch.equal(real, batch.index[batch.valid.bool()])
        assert sum(p.share for p in mine) == pytest.approx(1)
        assert [p.last for p in mine] == [False] * (len(mine) - 1) + [True]
    assert sum(p.last for p in parts) == Loader(split, config(), 5, World(), 3).steps(WALK) == 4


def test_threads_and_batches_ahead_change_nothing(split):
    reference = collect(split, WALK, threads=1, prefetch=1)
    other = collect(split, WALK, threads=5, prefetch=9)
    assert all(same(a, b) for a, b in zip(reference, other))


@pytest.mark.parametrize("step", [0, 1, 3, 4])
def test_resuming_at_a_step_yields_the_same_remainder(split, step):
    rest = collect(split, WALK, first_step=step)
    whole = collect(split, WALK)[step:]
    assert len(rest) == len(whole)
    assert all(same(a, b) for a, b in zip(rest, whole))


def test_the_stream_beside_goes_round_with_fresh_views(split):
    pass_ = Pass(np.arange(24), second=np.array([30, 31, 32]), batch=6, second_batch=4)
    batches = collect(split, pass_)
    beside = torch.cat([b.second.index for b in batches])
    assert beside.tolist() == [30, 31, 32] * 5 + [30]
    pictures = torch.cat([b.second.views["weak"] for b in batches])
    assert len({p.numpy().tobytes() for p in pictures[::3]}) > 1, "the same sample, seen again, is cropped anew"
    both = [collect(split, pass_, rank, 2) for rank in range(2)]
    for step, whole in enumerate(batches):
        together = torch.cat([r[step].second.index[r[step].second.valid.bool()] for r in both])
        assert torch.equal(together, whole.second.index)


def test_the_stream_beside_can_have_views_of_its_own(split):
    pass_ = Pass(np.arange(24), ("weak", "strong"), second=np.array([30, 31, 32]), batch=6)
    same_views = collect(split, pass_)
    other = collect(split, replace(pass_, second_views=("strong", "strong2")))
    for a, b in zip(same_views, other, strict=True):
        assert same(a, b)
        assert list(b.second.views) == ["strong", "strong2"]
        assert torch.equal(a.second.views["strong"], b.second.views["strong"])
        assert torch.equal(a.second.index, b.second.index)


def test_a_batch_says_which_network_learns_and_nothing_else_changes(split):
    pass_ = Pass(np.arange(24), second=np.array([30, 31, 32]), batch=6)
    other = collect(split, replace(pass_, learner=1))
    assert {(b.learner, b.second.learner) for b in other} == {(1, 1)}
    assert [b.step for b in other] == [0, 1, 2, 3]
    for a, b in zip(collect(split, pass_), other, strict=True):
        assert same(a, b)
        assert same(a.second, b.second)


def test_a_sample_that_comes_again_in_a_pass_is_cropped_anew(split):
    batches = collect(split, Pass(np.full(24, 3)))
    assert len({p.numpy().tobytes() for b in batches for p in b.views["weak"]}) > 5


def test_strong_views_may_have_their_own_constants_and_no_augmix(split):
    plain = collect(split, Pass(np.arange(12), views=("strong",)), augmix="none")[0].views["strong"]
    other = collect(split, Pass(np.arange(12), views=("strong",)), augmix="none", strong_mean=(0.5, 0.5, 0.5))[0]
    assert torch.allclose(plain - 0.5, other.views["strong"])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_survey_covers_the_split_once_in_index_order(split, world):
    seen = []
    for rank in range(world):
        loader = Loader(split, config(), 5, World(rank, world))
        for index, images in loader.survey():
            seen += index.tolist()
            assert torch.allclose(images[:, 0, 0, 0] * 255, index.float())
    assert seen == list(range(N))
    rest = [i for index, _ in Loader(split, config(), 5, World()).survey(first_row=30) for i in index.tolist()]
    assert rest == list(range(30, N))


def test_a_picture_that_does_not_decode_is_grey_masked_and_counted(split):
    split.pictures[4] = b"no picture"
    loader = Loader(split, config(max_bad=0.1), 5, World())
    batches = list(loader.batches(WALK, 3))
    index, valid = torch.cat([b.index for b in batches]), torch.cat([b.valid for b in batches])
    assert valid[index == 4].sum() == 0
    assert valid.sum() == N - 1
    batch = next(b for b in batches if 4 in b.index)
    assert torch.allclose(batch.views["weak"][batch.index == 4], torch.tensor(128 / 255))
    assert list(loader.bad) == [4]
    assert "not a JPEG" in loader.bad[4]

    survey = Loader(split, config(), 5, World())
    assert sum(len(index) for index, _ in survey.survey()) == N
    assert list(survey.bad) == [4]


def test_too_many_bad_pictures_stop_the_run_and_are_named(split):
    split.pictures[4] = split.pictures[5] = b"no picture"
    with pytest.raises(UserError, match=r"2 pictures did not decode.*sample [45]: not a JPEG.*raise data\.max_bad"):
        collect(split, WALK, max_bad=0.02)
    split.pictures[5] = split.pictures[6]
    with pytest.raises(UserError, match="1 pictures"):
        collect(split, WALK, max_bad=0)


def test_a_picture_cut_short_is_used_and_counted(split):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).save(out, "JPEG")
    split.pictures[7] = out.getvalue()[: out.tell() // 2]
    loader = Loader(split, config(), 5, World())
    assert sum(b.valid.sum().item() for b in loader.batches(WALK, 3)) == N
    assert loader.cut_short == {7}
    assert not loader.bad


def decoding_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("decode")]


def test_an_abandoned_walk_leaves_no_thread_behind(split):
    batches = Loader(split, config(threads=3), 5, World()).batches(WALK, 3)
    next(batches)
    assert decoding_threads()
    batches.close()
    assert not decoding_threads()


def test_an_error_in_a_thread_reaches_the_consumer(split):
    class Broken(Memory):
        def read(self, index: int) -> bytes:
            if index == WALK.order[20]:
                raise OSError("the disk is gone")
            return super().read(index)

    batches = Loader(Broken(split.pictures, split.shard_sizes), config(), 5, World()).batches(WALK, 3)
    next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        list(batches)
    assert not decoding_threads()


def test_small_pictures_are_decoded_once_in_a_run_and_change_nothing(split):
    class Counting(Memory):
        reads = 0

        def read(self, index: int) -> bytes:
            self.reads += 1
            return super().read(index)

    counting = Counting(split.pictures, split.shard_sizes)
    loader = Loader(counting, config(), 5, World())
    first, second = list(loader.batches(WALK, 3)), list(loader.batches(WALK, 3))
    assert counting.reads <= N + 1, "one for each sample, one for the stand-in that may be decoded beside it"
    assert all(same(a, b) for a, b in zip(first, second))
    photographs = Loader(counting, config(crop="resized"), 5, World())
    counting.reads = 0
    for order_key in (1, 2):
        list(photographs.batches(Pass(np.arange(12)), order_key))
    assert counting.reads == 24


def test_waiting_for_pictures_is_measured(split):
    class Slow(Memory):
        def read(self, index: int) -> bytes:
            time.sleep(0.005)
            return super().read(index)

    loader = Loader(Slow(split.pictures, split.shard_sizes), config(threads=1), 5, World())
    start = time.perf_counter()
    list(loader.batches(WALK, 3))
    assert 0.1 < loader.wait_seconds <= time.perf_counter() - start


def test_the_split_hears_which_shards_come_next(split):
    pass_ = Pass(sampling.shuffled(N, 0, 0, 0, None, split.shard_sizes, 1))
    first_use = list(dict.fromkeys((pass_.order // 10).tolist()))
    collect(split, pass_)
    assert split.told[0] == first_use
    assert split.told[-1] == first_use[-len(split.told[-1]) :]
    assert all(len(a) > len(b) for a, b in zip(split.told, split.told[1:]))


def test_an_unknown_view_is_refused(split):
    with pytest.raises(ValueError, match="not sideways"):
        collect(split, Pass(np.arange(4), views=("sideways",)))


def test_an_empty_order_has_no_steps(split):
    assert collect(split, Pass(np.zeros(0, np.int64))) == []


def test_real_shards_give_their_labels_and_pictures(digits):
    train = open_split(digits, "train")
    pass_ = Pass(sampling.shuffled(len(train), 0, 0, shard_sizes=train.shard_sizes, window=1))
    loader = Loader(train, config(batch=64, size=16), 0, World())
    batches = list(loader.batches(pass_, 0))
    index, label = torch.cat([b.index for b in batches]), torch.cat([b.label for b in batches])
    assert sorted(set(index.tolist())) == list(range(len(train)))
    assert (label.numpy() == train.given[index.numpy()]).all()
    assert not loader.bad
    samples, images = next(loader.survey())
    expected = np.stack([center_crop(decode(train.read(int(i)))[0], 16, 16) for i in samples])
    assert np.allclose(images.permute(0, 2, 3, 1).numpy() * 255, expected, atol=1e-3)


def test_a_survey_has_a_batch_of_its_own_on_every_rank(split):
    def sizes(ranks: int, **changes: object) -> list[int]:
        return [len(index) for index, _ in Loader(split, config(**changes), 5, World(0, ranks)).survey()]

    assert sizes(1) == [37], "at least 64 at a time: a training batch is 12"
    assert sizes(4) == [9], "not the part of a training batch that a rank has"
    assert sizes(1, eval_batch=10) == [10, 10, 10, 7]
    assert sizes(2, eval_batch=10) == [10, 8]
    assert config(batch=512).eval_rows(2) == 256


@pytest.mark.parametrize("augmix", ["released", "none"])
def test_the_memory_layout_is_the_networks_and_changes_no_value(split, augmix):
    """A decoder writes channels last; a network of that layout gets them without a copy to another one and back."""
    layouts = {False: torch.contiguous_format, True: torch.channels_last}
    batches, surveys = [], []
    for channels_last, layout in layouts.items():
        loader = Loader(split, config(augmix=augmix), 5, World(), 1, channels_last)
        batches.append(list(loader.batches(WALK, 3)))
        surveys.append([images for _, images in loader.survey()])
        every = [view for batch in batches[-1] for view in batch.views.values()] + surveys[-1]
        assert all(view.is_contiguous(memory_format=layout) for view in every)
    assert all(same(a, b) for a, b in zip(*batches, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*surveys, strict=True))
