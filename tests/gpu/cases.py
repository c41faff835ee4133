"""What runs on the fake device, one function per test of test_gpu_path.py, in one process of its own.

python tests/gpu/cases.py FILE      run every case, measure every method, write errors and counts to FILE
"""

from __future__ import annotations

import io
import json
import logging
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import measure  # it completes the path
import numpy as np
import pytest
import torch
from fake_cuda import CUDA, DeviceTensor, Event, FakeCuda, fake_ranks
from rivals import MemorySplit, Pictures
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.nn import functional as F

from launch import sweep_results
from pipeline.checkpoints.checkpointer import Checkpointer
from pipeline.data.batch import Batch, Pass
from pipeline.data.feature_loader import FeatureLoader
from pipeline.data.loader import Loader
from pipeline.distributed.world import World, init_distributed
from pipeline.methods.cross_entropy import CrossEntropy
from pipeline.training.memory_check import check_memory
from shards.base.errors import UserError

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def syncs(function: Callable[[], object]) -> int:
    """How often the host waits for the device in a function."""
    device = FakeCuda.now
    assert device is not None
    device.mark()
    function()
    return device.counts.syncs.total()


# -- the device itself ---------------------------------------------------------------------------------------------


@case
def host_and_device_tensors_do_not_mix() -> None:
    with FakeCuda():
        on_device, on_host = torch.ones(2, 2, device="cuda"), torch.ones(2, 2)
        for mixed in (
            lambda: on_device + on_host,
            lambda: torch.cat([on_device, on_host]),
            lambda: torch.where(on_host > 0, on_device, 0.0),
            lambda: on_device.index_add_(0, torch.tensor([0, 1]), on_device),
            lambda: F.linear(on_device, on_host),
            lambda: on_host.add_(on_device),
            lambda: on_host[0, 0].add_(on_device[0, 0]),
        ):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        with pytest.raises((RuntimeError, TypeError)):
            on_device.numpy()


@case
def a_host_number_is_an_argument_of_a_kernel() -> None:
    with FakeCuda():
        on_device, number = torch.ones(2, 2, device="cuda"), torch.tensor(3.0, dtype=torch.float64)
        total = on_device * number
        assert total.device == CUDA
        assert total.tolist() == [[3.0, 3.0], [3.0, 3.0]]
        assert syncs(lambda: on_device * number) == 0


@case
def everything_that_makes_the_host_wait_is_counted_once() -> None:
    with FakeCuda():
        x, i, mask = torch.arange(4.0, device="cuda"), torch.tensor(1, device="cuda"), torch.ones(4, device="cuda") > 0
        rows, pinned = np.ones(4, np.float32), torch.ones(4, pin_memory=True)

        def assign_by_mask() -> None:
            x[mask] = x.clone()

        def assign_one_number() -> None:
            x[0] = 1.0  # torch copies it, as the shapes are equal; into a longer row it would fill

        waiting: dict[str, Callable[[], object]] = {
            "item": lambda: x[0].item(),
            "float": lambda: float(x[0]),
            "int": lambda: int(x[0]),
            "bool": lambda: bool(x[0]),
            "comparison": lambda: 1 if x[0] > 0 else 2,
            "tolist": lambda: x.tolist(),
            "cpu": lambda: x.cpu(),
            "to host": lambda: x.to("cpu"),
            "nonzero": lambda: mask.nonzero(),
            "where": lambda: torch.where(mask),
            "masked_select": lambda: x.masked_select(mask),
            "mask as index": lambda: x[mask],
            "assignment by mask": assign_by_mask,
            "assignment of one number": assign_one_number,
            "a number as index": lambda: x[i],
            "an index on the host": lambda: x[torch.tensor([0, 1])],
            "unique": lambda: x.unique(),
            "bincount": lambda: torch.bincount(x.long()),
            "equal": lambda: torch.equal(x, x),
            "one_hot of unknown width": lambda: F.one_hot(i),
            "tensor of a list": lambda: torch.tensor([1.0, 2.0], device="cuda"),
            "tensor of a number": lambda: torch.tensor(1.0, device="cuda"),
            "array to device": lambda: torch.from_numpy(rows).to("cuda"),
            "array to device, not pinned": lambda: torch.from_numpy(rows).to("cuda", non_blocking=True),
            "pinned, blocking": lambda: pinned.to("cuda"),
            "copy from host": lambda: x.copy_(torch.ones(4)),
            "copy to host": lambda: torch.ones(4).copy_(x),
            "synchronize": torch.cuda.synchronize,
        }
        found = {name: syncs(wait) for name, wait in waiting.items()}
        assert set(found.values()) == {1}, found


@case
def what_stays_on_the_device_is_not_counted() -> None:
    with FakeCuda():
        x, mask = torch.arange(4.0, device="cuda"), torch.ones(4, device="cuda") > 0
        index, pinned = torch.arange(3, device="cuda"), torch.ones(4, pin_memory=True)

        def assign() -> None:
            x[mask], x[1:3] = 2.0, 3.0

        free: dict[str, Callable[[], object]] = {
            "fill": lambda: torch.full((3,), 2.0, device="cuda"),
            "assignment of numbers": assign,
            "where": lambda: torch.where(mask, x, 0.0),
            "masked_fill": lambda: x.masked_fill(mask, 1.0),
            "index": lambda: x[index],
            "one_hot": lambda: F.one_hot(index, 4),
            "pinned": lambda: pinned.to("cuda", non_blocking=True),
            "pinned by hand": lambda: torch.ones(4).pin_memory().to("cuda", non_blocking=True),
            "copy to pinned memory": lambda: pinned.copy_(x, non_blocking=True),
            "loss": lambda: F.cross_entropy(torch.ones(3, 4, device="cuda"), index),
            "host tensors": lambda: (torch.ones(3).sum().item(), torch.ones(3)[torch.ones(3) > 0]),
        }
        found = {name: syncs(do) for name, do in free.items()}
        assert set(found.values()) == {0}, found


@case
def operators_are_counted_and_views_are_not() -> None:
    with FakeCuda() as device:
        x = torch.ones(4, 4, device="cuda")
        device.mark()
        x.view(16)[:4].detach().expand(3, 4)
        torch.empty_like(x)
        assert device.counts.operators == 0
        (x + x).relu_()
        torch._foreach_mul_([x, x, x], 2.0)
        assert dict(device.counts.called) == {"aten::add": 1, "aten::relu_": 1, "aten::_foreach_mul_": 1}


@case
def autocast_follows_the_lists_of_cuda() -> None:
    with FakeCuda():
        linear = nn.Linear(4, 4).to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = linear(torch.ones(2, 4, device="cuda"))
            assert out.dtype == torch.bfloat16
            assert out.softmax(1).dtype == torch.float32  # on a CPU it stays bfloat16
        out.sum().backward()
        assert linear.weight.grad is not None
        assert linear.weight.grad.dtype == torch.float32


@case
def gradients_and_their_gradients_are_those_of_the_cpu() -> None:
    def gradients(where: str) -> list[list[float]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(where)
        x = torch.linspace(-1, 1, 12).view(3, 4).to(where).requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [p.grad.flatten().tolist() for p in net.parameters() if p.grad is not None]

    with FakeCuda():
        found = gradients("cuda")
    assert found == gradients("cpu")
    assert len(found) == 3


@case
def a_module_moves_with_its_parameters_and_buffers() -> None:
    with FakeCuda():
        net = nn.BatchNorm1d(4).to("cuda")
        assert all(isinstance(t, DeviceTensor) and t.is_cuda for t in [*net.parameters(), *net.buffers()])
        assert isinstance(net.weight, nn.Parameter)


@case
def collectives_of_host_and_device_are_counted_apart() -> None:
    with FakeCuda() as device, fake_ranks(3, 8):
        world = World(3, 8, 0, CUDA)
        device.mark()
        world.all_reduce_sum(torch.ones(2))
        assert (device.counts.host_collectives, device.counts.collectives) == (1, 0)
        rows = torch.full((2, 1), 5.0, device="cuda", requires_grad=True)
        gathered = world.all_gather_rows(rows, [2] * 8, grad=True)
        assert gathered.shape == (16, 1)
        assert device.counts.collectives == 1
        gathered.sum().backward()
        assert device.counts.collectives == 2


# -- the harness sees faults ---------------------------------------------------------------------------------------


@cache
def rows_with(fault: type[CrossEntropy]) -> dict[str, Any]:
    with mock.patch("pipeline.training.build.method_class", return_value=fault):
        return measure.budget(measure.windows_of("cross_entropy", "one rank, bf16"))


def waits(rows: dict[str, Any], kind: str) -> int:
    return max(sum(row["syncs"].values()) for name, row in rows.items() if name.startswith(kind))


class ReadsItsLoss(CrossEntropy):
    def forward(self, batch: Batch) -> dict[str, Tensor]:
        losses = super().forward(batch)
        return losses if losses["loss"].item() > 0 else {**losses}


class ForgetsToRegisterABuffer(CrossEntropy):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weights = torch.ones(self.data.classes)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        losses = super().forward(batch)
        return {**losses, "mean_weight": self.weights.take(batch.label).mean()}


class MixesAHostTensorIn(CrossEntropy):
    def forward(self, batch: Batch) -> dict[str, Tensor]:
        seen = torch.from_numpy(np.ones(len(batch.index), np.float32))
        return super().forward(batch) | {"seen": (batch.valid * seen).sum()}


class WaitsAfterTheStep(CrossEntropy):
    def after_step(self) -> None:
        super().after_step()
        torch.cuda.synchronize()


class ReadsItsScores(CrossEntropy):
    def scores(self, images: Tensor) -> dict[str, Tensor]:
        scores = super().scores(images)
        assert bool(scores["linear"].isfinite().all())
        return scores


@case
def an_item_in_a_step_is_seen() -> None:
    rows = rows_with(ReadsItsLoss)
    assert waits(rows, "step") == 1
    assert waits(rows, "evaluation") == waits(rows_with(CrossEntropy), "evaluation")


@case
def a_wait_after_the_step_is_seen() -> None:
    assert waits(rows_with(WaitsAfterTheStep), "step") == 1


@case
def a_wait_in_the_evaluation_is_seen() -> None:
    rows = rows_with(ReadsItsScores)
    assert waits(rows, "step") == 0
    assert waits(rows, "evaluation") == waits(rows_with(CrossEntropy), "evaluation") + 1


@case
def a_host_tensor_in_a_step_is_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        rows_with(MixesAHostTensorIn)


@case
def a_buffer_that_is_not_moved_is_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        rows_with(ForgetsToRegisterABuffer)


# -- the project on the device -------------------------------------------------------------------------------------


def losses_of(method: str, world: World, *words: str) -> list[dict[str, float]]:
    config = measure.tiny_config(method, "data.batch=16", *words)
    with FakeCuda() if world.device.type == "cuda" else nullcontext():
        steps = measure.trainer_of(config, world, 48).steps()
        return [{name: float(value.detach()) for name, value in losses.items()} for losses in steps]


@case
def a_run_on_the_device_has_the_losses_of_a_run_on_the_cpu() -> None:
    for method in ("prototypical", "mopro"):
        on_cpu, on_device = losses_of(method, World()), losses_of(method, measure.FakeWorld())
        assert len(on_cpu) == len(on_device) > 5
        for one, other in zip(on_cpu, on_device):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@case
def a_self_supervised_start_does_not_wait() -> None:
    for world, samples, words in measure.SETUPS.values():
        config = measure.tiny_config("dividemix", *words, "model.start=simclr", "model.start_part=1")
        with FakeCuda() as device, fake_ranks(world.rank, world.size) if world.size > 1 else nullcontext():
            measure._train(config, world, samples)
        rows = measure.budget(device.windows)
        steps = {name: row["syncs"] for name, row in rows.items() if name.startswith("step in self-supervised start")}
        assert steps
        assert not any(steps.values()), steps


@case
def half_precision_with_a_loss_scaler_does_not_wait() -> None:
    config = measure.tiny_config("cross_entropy", "data.batch=16", "train.precision=fp16", "optim.accumulate=2")
    with FakeCuda() as device:
        trainer = measure.trainer_of(config, measure.FakeWorld(), 64)
        trainer.run()
        scale = trainer.engine.optimizer_state_dict()["scaler"]["scale"]
    assert scale == 2.0**16  # never halved: every step was taken
    assert waits(measure.budget(device.windows), "step") == 0


@case
def fine_tuning_on_the_device_does_not_wait_and_has_the_losses_of_the_cpu() -> None:
    words = ("optim.name=adamw", "optim.lr=0.001", "optim.decay_norms=false", "optim.layer_decay=0.7",
             "optim.schedule_by=step", "model.freeze=1")  # fmt: skip
    on_cpu = losses_of("cross_entropy", World(), *words)
    with FakeCuda() as device:
        config = measure.tiny_config("cross_entropy", "data.batch=16", *words)
        steps = measure.trainer_of(config, measure.FakeWorld(), 48).steps()
        on_device = [{name: value.detach() for name, value in losses.items()} for losses in steps]
        assert waits(measure.budget(device.windows), "step") == 0
        found = [{name: float(value) for name, value in losses.items()} for losses in on_device]
    for one, other in zip(on_cpu, found, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@case
def batches_reach_the_device_from_pinned_buffers_that_are_reused() -> None:
    log: list[str] = []

    class Logged(Event):
        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

    pictures = Pictures(64, 3)
    split: Any = MemorySplit(pictures, 3)
    config = measure.tiny_config("cross_entropy", "data.batch=8", "data.prefetch=1").data
    with FakeCuda() as device, mock.patch.object(torch.cuda, "Event", Logged):
        loader = Loader(split, config, 0, measure.FakeWorld())
        device.mark()
        batches = [batch.views["weak"] for batch in loader.batches(Pass(np.arange(64)), 0)]
        assert device.counts.syncs.total() == 0
        assert device.counts.operators > 0
        pixels = [buffer for buffer, _ in loader._free]
        assert all(buffer.is_pinned() for buffer in pixels)
        found = [batch.cpu() for batch in batches]
    assert log.count("record") == 8
    # Three buffers serve eight batches: each is used again only after the copy from it is done.
    assert log.count("wait") == 8 - len(pixels)
    on_host = [batch.views["weak"] for batch in Loader(split, config, 0, World()).batches(Pass(np.arange(64)), 0)]
    assert all(torch.equal(one, other) for one, other in zip(found, on_host))


class Features:
    """Stored features in memory: a test view, a weak and a strong one."""

    width, bad, shard_sizes = 5, {3: "broken"}, (64,)
    views = {"test": 0, "weak0": 1, "strong0": 2}  # noqa: RUF012
    numbers = np.random.default_rng(0).normal(size=(3, 64, 5)).astype(np.float16)

    def count(self, kind: str) -> int:
        return 1

    def read(self, view: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
        out[:] = self.numbers[view, index]

    def prefetch(self, blocks: Any) -> None: ...


@case
def stored_features_reach_the_device_without_waiting() -> None:
    features: Any = Features()
    config = measure.tiny_config("cross_entropy", "data.batch=8", "data.prefetch=1").data
    given = np.zeros(64, np.int32)
    with FakeCuda() as device:
        loader = FeatureLoader(given, features, config, 0, measure.FakeWorld())
        device.mark()
        batches = [batch.views["strong"] for batch in loader.batches(Pass(np.arange(64), ("strong",)), 0)]
        assert device.counts.syncs.total() == 0
        assert all(buffer.is_pinned() for buffer, _ in loader._free)
        found = torch.cat([batch.cpu() for batch in batches])
    assert torch.equal(found, torch.from_numpy(features.numbers[2]).float())


@case
def a_checkpoint_is_copied_without_waiting_for_each_tensor() -> None:
    with FakeCuda() as device:
        saver = Checkpointer("memory://fake-cuda", 2, measure.FakeWorld(), background=False)
        tensors = {name: torch.full((3,), float(number), device="cuda") for number, name in enumerate("abc")}
        device.mark()
        copies = saver._copy(tensors)
        assert device.counts.syncs.total() == 1  # one for all
        assert all(copy.is_pinned() for copy in copies.values())
        assert {name: copy.tolist() for name, copy in copies.items()} == {
            "a": [0.0] * 3,
            "b": [1.0] * 3,
            "c": [2.0] * 3,
        }
        again = saver._copy(tensors)
        assert all(again[name] is copies[name] for name in copies)  # their memory is kept


@case
def rows_of_all_ranks_are_gathered_into_place_if_all_have_equally_many() -> None:
    with FakeCuda() as device, fake_ranks(3, 8):
        world, rows = World(3, 8, 0, CUDA), torch.full((2, 1), 5.0, device="cuda")
        device.mark()
        even = world.all_gather_rows(rows, [2] * 8)
        assert (device.counts.collectives, device.counts.operators) == (1, 0)  # no copy
        assert even.tolist() == [[5.0]] * 16
        uneven = world.all_gather_rows(rows[:1], [2, 2, 2, 1, 2, 2, 2, 2])
        assert uneven.shape == (15, 1)
        assert device.counts.collectives == 2


@case
def ddp_is_told_the_gpu_of_its_rank() -> None:
    world = measure.FakeWorld(3, 8, 0)
    with FakeCuda(), fake_ranks(3, 8):
        trainer = measure.trainer_of(measure.tiny_config("cross_entropy", "data.batch=32"), world, 64)
        trainer.engine.begin_stage(trainer.method.stages()[0], resuming=False)
        wrapped = trainer.engine.wrapped  # type: ignore[attr-defined]
        assert (wrapped.device_ids, wrapped.device) == ([0], CUDA)


@case
def a_rank_takes_the_gpu_of_its_number_before_it_joins_the_group() -> None:
    calls: list[tuple[str, Any]] = []
    ranks = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "1"}
    store = HashStore()
    store.set("device/1", "cuda (fake)")
    with (
        FakeCuda(),
        mock.patch.dict("os.environ", ranks),
        mock.patch.object(torch.cuda, "set_device", lambda device: calls.append(("device", device))),
        mock.patch("pipeline.distributed.world.rendezvous", side_effect=lambda *_, **__: iter([(store, 0, 2)])),
        mock.patch("torch.distributed.init_process_group", lambda backend, **_: calls.append(("group", backend))),
    ):
        for wish in ("cuda", "auto"):
            world = init_distributed(wish)
            assert (world.rank, world.size, world.local_rank, world.device) == (0, 2, 1, torch.device("cuda", 1))
            assert "2 ranks on cuda (fake)" in world.about
        assert calls == 2 * [("device", torch.device("cuda", 1)), ("group", "cpu:gloo,cuda:nccl")]


@case
def a_run_that_does_not_fit_on_its_gpu_is_refused() -> None:
    config, world = measure.tiny_config("cross_entropy"), measure.FakeWorld()
    with FakeCuda():
        with mock.patch.object(torch.cuda, "mem_get_info", return_value=(80 * 10**9, 80 * 10**9), create=True):
            check_memory(config, 1000, 10, world)
        with (
            mock.patch.object(torch.cuda, "mem_get_info", return_value=(1000, 2000), create=True),
            pytest.raises(UserError, match="on the GPU of rank 0"),
        ):
            check_memory(config, 1000, 10, world)


@case
def the_results_of_a_sweep_say_that_there_was_a_gpu() -> None:
    with FakeCuda(), tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        sweep_results.write_results(Path(folder) / "results.json", [], "")
        assert json.loads((Path(folder) / "results.json").read_text())["made"]["machine"].endswith(", CUDA")


def main() -> None:
    logging.disable(logging.WARNING)
    errors: dict[str, str] = {}
    for name, function in CASES.items():
        try:
            function()
        except BaseException:
            errors[name] = traceback.format_exc()
    found = {"errors": errors, "budgets": measure.measure(measure.METHODS, tuple(measure.SETUPS))}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
