"""`make gpu-check`: what only a machine with GPUs can show, in about two minutes. Prints a table to send us.

Every check compares the GPUs with something exact: the CPU, one GPU alone, float64, or torch's own layers. The checks run on CPU ranks
too (`device=cpu`); that is how they are tested.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from shards.base import cli
from shards.base.errors import UserError
from shards.base.settings import Settings, merge

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from pipeline.config import Config
    from pipeline.data.batch import Batch
    from pipeline.distributed.world import World

    Check = Callable[["World", "CheckConfig"], Iterable["Row"]]

PROG = "python -m launch.gpu_check"
ABOUT = """Check this machine's GPUs in about two minutes: exact results on all of them, memory, images per second.

The table it prints is worth sending with every question about speed or results."""


class CheckConfig(Settings):
    device: Literal["cuda", "cpu"] = Field("cuda", description="cpu: the same checks on CPU ranks")
    ranks: NonNegativeInt = Field(0, description="how many; 0 = one for each GPU of this machine")
    backbone: str = Field("inception_resnet_v2", description="network of the speed and memory checks")
    size: PositiveInt = Field(299, description="side of its pictures")
    rows: PositiveInt = Field(16, description="pictures per GPU and step in these checks")
    steps: PositiveInt = Field(8, description="timed steps")
    only: tuple[str, ...] = Field((), description="names of checks, such as [batch_norm, speed]; empty = all")


COMMAND = cli.Command(PROG, ABOUT, CheckConfig)


def main(argv: list[str]) -> int:
    config = COMMAND.load(argv)
    _chosen(config.only)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
        return _check_all(config)
    ranks = config.ranks or _count_gpus(config.device)
    command = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone", "-m", "launch.gpu_check"]
    return subprocess.run([sys.executable, *command, *argv], check=False).returncode


def _count_gpus(device: str) -> int:
    import torch

    if device == "cpu":
        return 2
    if not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} sees no GPU. Look at nvidia-smi, and at how README installs a build of torch for your driver."
        )
    return torch.cuda.device_count()


# -- the table -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    check: str
    seen: str
    passed: bool | None = None  # None: a number without a bound

    def __str__(self) -> str:
        verdict = {True: "ok", False: "FAILED", None: ""}[self.passed]
        return f"| {self.check} | {self.seen} | {verdict} |"


def _check_all(config: CheckConfig) -> int:
    """All ranks run every check together; rank 0 prints a row as soon as it is known."""
    from pipeline.distributed.world import init_distributed, shutdown_distributed

    world = init_distributed(config.device, 120.0)
    failed = 0
    if world.is_main:
        print("| check | seen | |\n|---|---|---|", flush=True)
    for check in _chosen(config.only):
        started = time.monotonic()
        for row in _rows_of(check, world, config):
            worst = _worst(world.all_gather_object(row))
            failed += worst.passed is False
            if world.is_main:
                print(worst, flush=True)
        if world.is_main:
            print(f"| | {time.monotonic() - started:.0f} s | |", flush=True)
    if world.is_main:
        print(f"\n{failed} of the checks failed." if failed else "\nAll checks passed.")
    shutdown_distributed()
    return int(failed > 0)


def _chosen(only: tuple[str, ...]) -> list[Check]:
    names = [check.__name__ for check in CHECKS]
    if wrong := set(only) - set(names):
        raise UserError(f"only: there is no check {', '.join(sorted(wrong))}. There are {', '.join(names)}.")
    return [check for check in CHECKS if not only or check.__name__ in only]


def _rows_of(check: Check, world: World, config: CheckConfig) -> Iterator[Row]:
    try:
        yield from check(world, config)
    except UserError as error:
        yield Row(check.__name__, str(error), None)
    except Exception as error:  # the other checks are still worth having
        yield Row(check.__name__, " ".join(f"{type(error).__name__}: {error}".split())[:300], False)


def _worst(by_rank: Sequence[Row]) -> Row:
    """That of the first rank where it failed, else that of rank 0."""
    bad = [(rank, row) for rank, row in enumerate(by_rank) if row.passed is False]
    return Row(bad[0][1].check, f"rank {bad[0][0]}: {bad[0][1].seen}", False) if bad else by_rank[0]


def _gap(one: Tensor, other: Tensor) -> float:
    """The largest difference, by the largest number."""
    a, b = one.detach().double().cpu(), other.detach().double().cpu()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))


def _largest_gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(_gap(one[name], other[name]) for name in one if one[name].is_floating_point())


# -- a small training on pictures in memory --------------------------------------------------------------------------------


class Pictures:
    """Noise with the colour of its class, as JPEG files in memory."""

    def __init__(self, count: int, size: int, classes: int = 10) -> None:
        import numpy as np
        from PIL import Image

        rng = np.random.default_rng(0)
        self.given: np.ndarray = np.arange(count, dtype=np.int32) % classes
        self.shard_sizes = (count,)
        self.files = []
        for label in self.given:
            colour = np.array([label * 12, label % 3 * 40, 100 - label * 10])
            pixels = rng.integers(0, 128, (size, size, 3)) + colour
            file = io.BytesIO()
            Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG")
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> bytes:
        return self.files[index]

    def prefetch(self, shards: Iterable[int]) -> None: ...


class SmallRun:
    """A method and its engine in the main stage, with batches from the real loader."""

    def __init__(self, world: World, pictures: Pictures, settings: dict[str, Any]) -> None:
        import torch

        from pipeline.config import Config
        from pipeline.data.batch import TrainingSet
        from pipeline.data.loader import Loader
        from pipeline.engines import make_engine
        from pipeline.methods.base import load_method

        small = world.device.type == "cpu"  # slow at half precision
        base = {
            "data": {"batch": 16 * int(os.environ["WORLD_SIZE"]), "size": 8 if small else 32, "threads": 2},
            "model": {"width": 8 if small else 16},
            "method": {"name": "prototypical", "warmup_steps": 0, "cleaning_start": 0.5},
            "optim": {"lr": 0.02},
        }
        self.config: Config = Config.model_validate(merge(base, settings))
        self.world, self.pictures = world, pictures
        self.loader = Loader(pictures, self.config.data, 0, world, self.config.optim.accumulate)
        torch.manual_seed(0)
        data = TrainingSet(pictures.given, 10, 0, self.config.data.batch)
        self.method = load_method("prototypical")(self.config, data, world).to(world.device)
        with torch.no_grad():  # prototypes that are not zero
            self.method.prototypes.normal_(generator=torch.Generator(world.device).manual_seed(0))  # type: ignore[operator]
        stage = len(self.method.stages()) - 1
        self.method.set_epoch(stage, 0)
        self.engine = make_engine(self.config, self.method, world)
        self.engine.begin_stage(self.method.stages()[stage], resuming=False)
        self.method.train()

    def batches(self, steps: int) -> list[Batch]:
        import numpy as np

        from pipeline.data.batch import Pass

        order = np.resize(np.arange(len(self.pictures)), steps * self.config.data.batch)
        return list(self.loader.batches(Pass(order, ("weak", "strong")), 0))

    def losses(self, steps: int) -> list[float]:
        """Means over ranks."""
        found = [self.engine.step(batch, self.config.optim.lr)["loss"] for batch in self.batches(steps)]
        return [float(self.world.all_reduce_sum(loss.double())) / self.world.size for loss in found]

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.engine.model_state_dict().items()}


def _alone(world: World) -> World:
    from pipeline.distributed.world import World as One

    return One(0, 1, world.local_rank, world.device)


# -- the checks ------------------------------------------------------------------------------------------------------------


def machine(world: World, config: CheckConfig) -> Iterable[Row]:
    import torch

    name = torch.cuda.get_device_name() if world.device.type == "cuda" else "CPU"
    yield Row(
        "machine",
        f"{world.size} x {name}, torch {torch.__version__}, CUDA {torch.version.cuda}, Python {sys.version.split()[0]}",
    )
    if world.device.type == "cuda":
        yield Row("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def conversion(world: World, config: CheckConfig) -> Iterable[Row]:
    """Our batch norm keeps the activations: evaluation is equal to the bit."""
    import copy

    import torch

    from pipeline.config import ModelConfig
    from pipeline.models.backbones import build_backbone
    from pipeline.models.batchnorm import CountedRows, convert_batchnorm

    original = build_backbone(ModelConfig(backbone=config.backbone))[0].eval().to(world.device)
    converted = convert_batchnorm(copy.deepcopy(original), CountedRows()).eval()
    images = torch.randn(2, 3, 96, 96, device=world.device)
    with torch.no_grad():
        gap = _gap(converted(images), original(images))
    yield Row(f"{config.backbone} with our batch norm, in evaluation", f"differs by {gap:.1e}", gap == 0)


def batch_norm(world: World, config: CheckConfig) -> Iterable[Row]:
    """Statistics over ranks against torch's own layer on the whole batch; then with rows that do not count."""
    import torch
    from torch import nn

    from pipeline.models.batchnorm import BatchNorm, CountedRows

    torch.manual_seed(0)
    rows = 6
    whole = torch.randn(rows * world.size, 32, 9, 9, device=world.device) * 3 + 1
    weights = torch.randn_like(whole)
    mine = slice(rows * world.rank, rows * (world.rank + 1))
    for title, counted in (("all rows", rows), ("without padding", rows - 2)):
        mask = (torch.arange(len(whole), device=world.device) % rows < counted).float()
        plain: nn.Module = nn.BatchNorm2d(32).to(world.device)
        x = whole[mask > 0].requires_grad_()
        expected = plain(x)
        (expected * weights[mask > 0]).sum().backward()
        shared = CountedRows(world)
        norm = BatchNorm(nn.BatchNorm2d(32), shared).to(world.device)
        own = whole[mine].clone().requires_grad_()
        with shared.use(None if counted == rows else mask[mine]):
            out = norm(own)
        (out * weights[mine] * mask[mine][:, None, None, None]).sum().backward()
        here = slice(counted * world.rank, counted * (world.rank + 1))
        assert own.grad is not None
        assert x.grad is not None
        gaps = (
            _gap(out[:counted], expected[here]),
            _gap(own.grad[:counted], x.grad[here]),
            _gap(norm.running_var, plain.running_var),  # type: ignore[arg-type]
        )
        yield Row(
            f"batch norm over ranks, {title}",
            "output, gradient, variance differ by " + ", ".join(f"{gap:.1e}" for gap in gaps),
            max(gaps) < 1e-4,
        )


def one_step(world: World, config: CheckConfig) -> Iterable[Row]:
    """A step of all ranks against the same step of one, for both engines."""
    pictures = Pictures(128 * world.size, 40)
    one = SmallRun(_alone(world), pictures, {})
    one.losses(1)
    ddp = SmallRun(world, pictures, {})
    ddp.losses(1)
    gap = _largest_gap(ddp.weights(), one.weights())
    yield Row(f"one step, {world.size} ranks against one", f"weights differ by {gap:.1e}", gap < 2e-3)
    for stage in (1, 3):
        deepspeed = SmallRun(world, pictures, {"engine": "deepspeed", "deepspeed": {"stage": stage}})
        deepspeed.losses(1)
        gap = _largest_gap(deepspeed.weights(), ddp.weights())
        deepspeed.engine.close()
        yield Row(f"one step, DeepSpeed ZeRO-{stage} against DDP", f"weights differ by {gap:.1e}", gap < 2e-3)


def collectives(world: World, config: CheckConfig) -> Iterable[Row]:
    """Prototypes by an all-reduce, and gathers of rows, against the same on the CPU."""
    import torch

    from pipeline.methods.parts.prototypes import class_prototypes

    torch.manual_seed(0)
    z, label = torch.randn(1000 * world.size, 50), torch.arange(1000 * world.size) % 10
    weight, previous = torch.rand(len(z)), torch.zeros(10, 50)
    expected, _ = class_prototypes(z, label, weight, previous, _alone(world))
    mine = slice(1000 * world.rank, 1000 * (world.rank + 1))
    z, label, weight, previous = (part.to(world.device) for part in (z[mine], label[mine], weight[mine], previous))
    gap = _gap(class_prototypes(z, label, weight, previous, world)[0], expected)
    yield Row("all-reduce of prototypes against the CPU", f"differs by {gap:.1e}", gap < 1e-6)
    rows = [3 + rank for rank in range(world.size)]
    wrong = []
    for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8):
        parts = [torch.arange(n * 4, device=world.device).view(n, 4).add(n).to(dtype) for n in rows]
        if not torch.equal(world.all_gather_rows(parts[world.rank], rows), torch.cat(parts)):
            wrong.append(str(dtype))
    yield Row("gather of unequal rows, five types", f"wrong for {', '.join(wrong)}" if wrong else "exact", not wrong)


def copies(world: World, config: CheckConfig) -> Iterable[Row]:
    """Batches that reach the device through pinned memory against those on the CPU."""
    import torch

    from pipeline.data.batch import Pass
    from pipeline.data.loader import Loader
    from pipeline.distributed.world import World as One

    pictures = Pictures(96, 40)
    run = SmallRun(world, pictures, {"data": {"batch": 2 * world.size, "prefetch": 8}})
    host = Loader(pictures, run.config.data, 0, One(world.rank, world.size))
    import numpy as np

    pass_, gaps = Pass(np.arange(96), ("weak", "strong")), []
    for here, there in zip(run.loader.batches(pass_, 0), host.batches(pass_, 0)):
        gaps += [_gap(here.views[name], there.views[name]) for name in here.views]
        gaps.append(float(not torch.equal(here.index.cpu(), there.index)))
    yield Row("batches through pinned memory against the CPU", f"differ by {max(gaps):.1e}", max(gaps) < 1e-4)


def precisions(world: World, config: CheckConfig) -> Iterable[Row]:
    pictures, first = Pictures(64 * world.size, 40), 0.0
    for precision in ("fp32", "bf16", "fp16"):
        losses = SmallRun(world, pictures, {"train": {"precision": precision}}).losses(12)
        first = first or losses[0]
        passed = losses[-1] < losses[0] and abs(losses[0] / first - 1) < 0.05
        yield Row(f"twelve steps in {precision}", f"loss {losses[0]:.3f} to {losses[-1]:.3f}", passed)


def variants(world: World, config: CheckConfig) -> Iterable[Row]:
    """Settings that must not change the result."""
    pictures = Pictures(64 * world.size, 40)
    plain = SmallRun(world, pictures, {})
    plain.losses(1)
    for name, settings in {
        "model.channels_last=true": {"channels_last": True},
        "model.checkpoint_activations=true": {"checkpoint_activations": True},
        "model.compile=true": {"compile": True},
    }.items():
        run = SmallRun(world, pictures, {"model": settings})
        run.losses(1)
        gap = _largest_gap(run.weights(), plain.weights())
        yield Row(f"one step with {name}", f"weights differ by {gap:.1e}", gap < 2e-3)


def deterministic(world: World, config: CheckConfig) -> Iterable[Row]:
    """train.deterministic=true: two runs agree in every bit."""
    import torch

    from pipeline.config import TrainConfig
    from pipeline.process.torch_settings import apply_torch_settings

    pictures = Pictures(64 * world.size, 40)
    apply_torch_settings(TrainConfig(deterministic=True))
    try:
        runs = [SmallRun(world, pictures, {}) for _ in range(2)]
        losses = [run.losses(3) for run in runs]
        one, two = (run.weights() for run in runs)
    finally:
        apply_torch_settings(TrainConfig())
    equal = losses[0] == losses[1] and all(torch.equal(one[name], two[name]) for name in one)
    yield Row("three steps twice with train.deterministic=true", "equal in every bit" if equal else "not equal", equal)


def speed(world: World, config: CheckConfig) -> Iterable[Row]:
    """Images per second of the Prototypical Classifier on synthetic batches, and the memory of a GPU against the estimate."""
    import torch

    pictures = Pictures(config.rows * world.size, config.size)
    for sync in (True, False):
        settings = {
            "data": {"batch": config.rows * world.size, "size": config.size, "prefetch": 1},
            "model": {"backbone": config.backbone, "channels_last": True, "sync_batchnorm": sync},
            "train": {"precision": "bf16"},
        }
        run = SmallRun(world, pictures, settings)
        (batch,) = run.batches(1)
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = _seconds(run, batch, config.steps)
        shared = "shared by all ranks" if sync else "of each rank"
        yield Row(
            f"{config.backbone}, {config.size} px, {config.rows} per rank, bf16, statistics {shared}",
            f"{config.rows * world.size / seconds:.0f} images/s, {seconds * 1e3:.0f} ms per step",
        )
        if sync:
            yield _memory(run)
        del run


def _memory(run: SmallRun) -> Row:
    """The peak on this GPU, which holds the work space of convolutions besides what is estimated."""
    import torch

    from pipeline.training.estimate import estimate

    parts = estimate(run.config, len(run.pictures), 10, run.world.size).device
    text = f"estimate {sum(part.bytes for part in parts) / 1e9:.2f} GB per rank"
    if run.world.device.type == "cuda":
        text = f"peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB, {text}"
    return Row("memory of that step", text)


def _seconds(run: SmallRun, batch: Batch, count: int) -> float:
    """Per step, after two that warm up."""
    started = 0.0
    for number in range(-2, count):
        if number == 0:
            _finish(run.world)
            started = time.perf_counter()
        run.engine.step(batch, 0.01)
    _finish(run.world)
    return (time.perf_counter() - started) / count


def _finish(world: World) -> None:
    """Wait for the device."""
    import torch

    if world.device.type == "cuda":
        torch.cuda.synchronize()


CHECKS: tuple[Check, ...] = (
    machine,
    conversion,
    batch_norm,
    one_step,
    collectives,
    copies,
    precisions,
    variants,
    deterministic,
    speed,
)


def start() -> None:
    from pipeline.process.exit_status import run_rank

    run_rank(main)


if __name__ == "__main__":
    start()
