"""The plain engine: R ranks do what one would do; bad steps leave no trace; state goes round unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_bench import Bench, apart, copied, poisoned, same, small
from ranks import on_ranks
from torch import Tensor

from pipeline.config import OptimConfig
from pipeline.distributed.world import World

PLAIN = {"momentum": 0.0, "weight_decay": 0.0}  # with lr=1 a step moves the weights by the gradient
CASES = [(method, accumulate) for method in ("cross_entropy", "prototypical") for accumulate in (1, 3)]


def gradients(world: World, url: str) -> dict[tuple[str, int], dict[str, Tensor]]:
    """The gradient of a short global batch: 37 pictures in groups of 8 do not divide among 2 or 4 ranks."""
    found = {}
    for method, accumulate in CASES:
        bench = Bench(world, url, small(method, data={"batch": 48}, optim={**PLAIN, "accumulate": accumulate}))
        before = bench.weights()
        bench.steps(37, lr=1.0)
        after = bench.weights()
        found[method, accumulate] = {
            name: before[name] - after[name] for name in before if before[name].is_floating_point()
        }
    return found


@pytest.fixture(scope="module")
def gradients_by_ranks(digits: str) -> dict[int, list[dict[tuple[str, int], dict[str, Tensor]]]]:
    return {size: on_ranks(size, gradients, digits) for size in (1, 2, 4)}


@pytest.mark.dist
@pytest.mark.parametrize(("method", "accumulate"), CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_gradient_does_not_depend_on_the_number_of_ranks(
    gradients_by_ranks: Any, method: str, accumulate: int, size: int
) -> None:
    whole = gradients_by_ranks[1][0][method, accumulate]
    assert max(value.abs().max() for value in whole.values()) > 1e-3
    for of_rank in gradients_by_ranks[size]:
        assert apart(of_rank[method, accumulate], whole) < 1e-3


@pytest.mark.dist
def test_all_ranks_move_alike(gradients_by_ranks: Any) -> None:
    for size in (2, 4):
        for case in CASES:
            assert all(same(of_rank[case], gradients_by_ranks[size][0][case]) for of_rank in gradients_by_ranks[size])


@pytest.mark.dist
def test_micro_batches_add_up_to_the_whole_batch(gradients_by_ranks: Any) -> None:
    found = gradients_by_ranks[1][0]
    assert apart(found["cross_entropy", 3], found["cross_entropy", 1]) < 1e-3


def length(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    return float(torch.cat([(before[name] - after[name]).flatten() for name in before]).norm())


def test_clipping_bounds_the_step_and_keeps_its_direction(digits: str) -> None:
    free, bound = (Bench(World(), digits, small(optim={**PLAIN, "clip": clip})) for clip in (0.0, 0.01))
    start = free.weights()
    for bench in (free, bound):
        bench.steps(64, lr=1.0)
    far, near = length(start, free.weights()), length(start, bound.weights())
    assert far > 0.02
    assert near == pytest.approx(0.01, rel=1e-3)
    moved_freely = {name: (value - start[name]) / far for name, value in free.weights().items()}
    moved_bound = {name: (value - start[name]) / near for name, value in bound.weights().items()}
    assert apart(moved_bound, moved_freely) < 1e-2


def test_a_stage_brings_its_own_optimiser_and_the_next_one_the_runs_again(digits: str) -> None:
    bench = Bench(World(), digits, small())
    bench.engine.begin_stage(bench.stage_of(optim=OptimConfig(momentum=0.5, weight_decay=0.1, clip=3)), resuming=False)
    group = bench.engine.optimizer.param_groups[0]  # type: ignore[attr-defined]
    assert (group["momentum"], group["weight_decay"], bench.engine.clip) == (0.5, 0.1, 3)  # type: ignore[attr-defined]
    bench.engine.begin_stage(bench.stage_of(fresh_optimizer=False), resuming=False)
    assert (group["momentum"], group["weight_decay"], bench.engine.clip) == (0.9, 5e-4, 0)  # type: ignore[attr-defined]


def test_only_what_a_pass_trains_moves_and_the_rest_keeps_its_momentum(digits: str) -> None:
    bench = Bench(World(), digits, small())
    bench.steps(64)
    weights, momentum = bench.weights(), copied(bench.engine.optimizer_state_dict()["momentum"])
    bench.engine.set_trainable(("network.head",))
    bench.steps(64, order_key=1)
    moved = {name for name, value in bench.weights().items() if not torch.equal(value, weights[name])}
    assert moved == {"network.head.weight", "network.head.bias"}
    after = bench.engine.optimizer_state_dict()["momentum"]
    assert {name for name in momentum if not torch.equal(momentum[name], after[name])} == moved


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_half_precision_learns_without_nan(digits: str, precision: str, norm: str) -> None:
    tiny = {"data": {"batch": 16}, "model": {"width": 4, "norm": norm}}  # CPUs are slow at this
    bench = Bench(World(), digits, small("prototypical", **tiny, train={"precision": precision}))
    start = bench.weights()
    losses = bench.steps(48)
    assert all(value == value for value in losses)
    assert all(torch.isfinite(value).all() for value in bench.weights().values())
    assert not torch.equal(start["network.head.weight"], bench.weights()["network.head.weight"])
    state = bench.engine.optimizer_state_dict()
    assert bool(state["scaler"]) == (precision == "fp16")


def bad_step(world: World, url: str, precision: str) -> dict[str, Any]:
    """A NaN on the last rank only, at once and later, and what it does to everybody."""
    tiny = {"data": {"batch": 16}, "model": {"width": 4, "norm": "batch"}}
    bench = Bench(world, url, small(**tiny, train={"precision": precision}, optim={"clip": 1.0}))
    found: dict[str, Any] = {"moved by bad": [], "bad": [], "moved by good": []}
    for order_key in range(2):
        start, momentum = bench.weights(), copied(bench.engine.optimizer_state_dict()["momentum"])
        for number in range(2):
            for batch in bench.batches(16, order_key):
                bench.engine.step(poisoned(batch) if world.rank == world.size - 1 else batch, 0.05)
            found["bad"].append((bench.engine.nonfinite_steps(), number + 1))
        counted = {name: value for name, value in bench.weights().items() if not name.endswith("num_batches_tracked")}
        found["moved by bad"].append(
            not same({name: start[name] for name in counted}, counted)
            or not same(momentum, bench.engine.optimizer_state_dict()["momentum"])
        )
        for _ in range(3):  # the scaler of fp16 may still look for its scale
            bench.steps(16, order_key)
        found["bad"].append((bench.engine.nonfinite_steps(), 0))
        found["moved by good"].append(
            not torch.equal(start["network.head.weight"], bench.weights()["network.head.weight"])
        )
    found["weights"] = bench.weights()
    return found


def check_bad_step(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["moved by bad"] == [False, False]
        assert of_rank["moved by good"] == [True, True]
        assert all(counted == expected for counted, expected in of_rank["bad"])
        assert same(of_rank["weights"], found[0]["weights"])
        assert all(torch.isfinite(value).all() for value in of_rank["weights"].values())


@pytest.mark.dist
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_gradient_that_is_not_finite_is_skipped_by_all_ranks_and_counted(
    digits: str, size: int, precision: str
) -> None:
    check_bad_step(on_ranks(size, bad_step, digits, precision))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_state_goes_round_bit_for_bit(digits: str, precision: str) -> None:
    config = small("prototypical", data={"batch": 16}, model={"width": 4}, train={"precision": precision})
    first = Bench(World(), digits, config)
    first.steps(32)
    second = Bench(World(), digits, config)
    second.engine.load_model_state_dict(first.weights())
    state = first.engine.optimizer_state_dict()
    second.engine.load_optimizer_state_dict({**state, "momentum": copied(state["momentum"])})
    assert same(second.engine.optimizer_state_dict()["momentum"], state["momentum"])
    for bench in (first, second):
        bench.steps(32, order_key=1)
    assert same(first.weights(), second.weights())
    assert first.engine.optimizer_state_dict()["scaler"] == second.engine.optimizer_state_dict()["scaler"]


def with_statistics(world: World, url: str, recompute: bool) -> dict[str, Tensor]:
    bench = Bench(world, url, small(model={"norm": "batch", "checkpoint_activations": recompute}, data={"batch": 32}))
    bench.steps(64)
    assert set(bench.engine.optimizer_state_dict()["momentum"]) <= set(bench.weights())
    return bench.weights()


@pytest.mark.dist
def test_running_statistics_are_those_of_all_ranks_and_recomputing_does_not_count_twice(digits: str) -> None:
    plain = on_ranks(2, with_statistics, digits, False)
    assert same(plain[0], plain[1])
    recomputed = on_ranks(2, with_statistics, digits, True)
    tracked = {name for name in plain[0] if name.endswith("num_batches_tracked")}
    assert tracked
    assert apart(
        {name: value for name, value in recomputed[0].items() if name not in tracked},
        {name: value for name, value in plain[0].items() if name not in tracked},
    ) < 1e-4  # fmt: skip


def learns_the_same(url: str, **model: Any) -> None:
    plain, changed = Bench(World(), url, small()), Bench(World(), url, small(model=model))
    assert changed.steps(128) == pytest.approx(plain.steps(128), rel=1e-4)
    assert apart(changed.weights(), plain.weights()) < 1e-3


def test_channels_last_learns_the_same(digits: str) -> None:
    learns_the_same(digits, channels_last=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_compiled_learns_the_same_under_the_same_names(digits: str) -> None:
    learns_the_same(digits, compile=True)
