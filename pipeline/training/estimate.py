"""How much memory a run needs on each rank, computed without allocating it.

The method is made of tensors without data. Its parameters and buffers are counted, so no method lists its tables. One step is
run with such tensors to count what autograd saves for the backward pass. R ranks, N samples, K classes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from pipeline.config import Asked, Config
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.data.crops import Views
from pipeline.data.loader import KEEP_BYTES
from pipeline.data.partition import MicroBatch, RankBatch, micro_batches
from pipeline.distributed.world import World
from pipeline.engines.optimizers import STATE
from pipeline.engines.parameters import require_gradients, trainable_parameters, trained_parameters
from pipeline.methods.base import Method
from pipeline.methods.simclr import method_class
from pipeline.models.backbones import input_shape
from pipeline.models.network import Average
from pipeline.models.precision import autocast_for
from shards.base.errors import UserError
from shards.config import BuildConfig
from shards.reader import read_manifest

MB, GB = 1e6, 1e9
INDEX_BYTES = 24  # shard, offset, size, given and true label of a sample (shards.reader.Split)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    name: str
    bytes: int


@dataclass
class Estimate:
    samples: int
    classes: int
    ranks: int
    device: list[Part] = field(default_factory=list)  # per rank
    host: list[Part] = field(default_factory=list)  # per rank
    main: list[Part] = field(default_factory=list)  # besides, on rank 0
    unknown: list[str] = field(default_factory=list)  # sentences about what is not counted


@dataclass(frozen=True)
class PaperWorld(World):
    """A rank among others that are not there: collectives return tensors of the right size."""

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        return value.detach().clone()

    def all_gather_rows(
        self, value: Tensor, rows: Sequence[int], grad: bool = False, out: Tensor | None = None
    ) -> Tensor:
        missing = sum(rows) - len(value)
        return torch.cat([value, value.new_empty(missing, *value.shape[1:])]) if missing else value


# -- what is there all the time ------------------------------------------------------------------------------------------


def method_without_data(config: Config, samples: int, classes: int, ranks: int) -> Method:
    """The method of the last rank, which holds most, made of tensors without data."""
    model = config.model.model_copy(update={"pretrained": "", "compile": False})
    given = np.arange(samples, dtype=np.int32) % max(classes, 1)
    data = TrainingSet(given, classes, config.seed, config.data.batch)
    world = PaperWorld(ranks - 1, ranks)
    with torch.device("meta"):
        return method_class(config)(config.model_copy(update={"model": model}), data, world)


def standing(config: Config, samples: int, classes: int, ranks: int) -> Estimate:
    """Weights, gradients, the optimiser's state, averages and tables; and what the data take on the host."""
    method = method_without_data(config, samples, classes, ranks)
    out = Estimate(samples, classes, ranks)
    averages = [module for module in method.modules() if isinstance(module, Average)]
    averaged = {id(t): t.nbytes for average in averages for t in (*average.parameters(), *average.buffers())}
    learned = sum(p.nbytes for _, p in trainable_parameters(method))
    weights = sum(p.nbytes for p in method.parameters() if id(p) not in averaged)  # frozen ones, too
    kept = STATE[config.optim.name]
    statistics = sum(b.nbytes for name, b in method.named_buffers() if "." in name and id(b) not in averaged)
    tables = {name: b.nbytes for name, b in method.named_buffers(recurse=False)}
    stage = config.deepspeed.stage if config.engine == "deepspeed" else 0
    share = -(-learned // ranks)
    out.device = [
        Part("weights", (-(-weights // ranks) if stage == 3 else weights) + statistics),
        Part("gradients", share if stage >= 2 else learned),
        Part(" and ".join(kept), len(kept) * (share if stage else learned)),
        Part("average of the weights", sum(averaged.values())),
        *(Part(f"table: {name}", size) for name, size in tables.items()),
    ]
    if stage:
        out.device.append(Part("optimiser's copy of its part of the weights", share))
        out.unknown.append("DeepSpeed's buckets, and what deepspeed.config changes")
    for name in sorted(method.growing):
        row = method.get_buffer(name)[:0].new_empty(1, *method.get_buffer(name).shape[1:]).nbytes
        out.unknown.append(
            f"{name}: {row:,} bytes for every sample that gets a row, at most {samples * row / GB:.2f} GB on each rank"
        )
    whole = {name: tables[name] * samples // max(len(method.get_buffer(name)), 1) for name in method.tables}
    out.host = [Part("index of the shards, order of an epoch", samples * (INDEX_BYTES + 16))]
    tensors = weights + len(kept) * learned + statistics + sum(averaged.values())
    out.main = [Part("copy for the checkpoint", tensors + sum((tables | whole).values()))]
    return out


# -- what a step and a survey need ---------------------------------------------------------------------------------------


def estimate(config: Config, samples: int, classes: int, ranks: int) -> Estimate:
    out = standing(config, samples, classes, ranks)
    try:
        step, rows, views = activations(config, classes, ranks)
        out.device.append(Part("activations and images of a micro-batch", step))
        row_bytes = math.prod(input_shape(config)) * (2 if config.model.from_features else 1)  # float16, or bytes
        out.host.append(Part("decoded batches", (config.data.prefetch + 2) * rows * views * row_bytes))
    except Exception as error:  # a method may look at values, which are not there
        out.unknown.append(f"activations: a step of {config.method.name} needs values ({type(error).__name__})")
    try:
        row, embedding = survey_row(config, classes)
        out.device.append(Part("survey of this rank's samples", row * -(-samples // ranks)))
        gathered = method_without_data(config, samples, classes, ranks).gathered_samples()
        if not any(part.bytes == embedding * gathered for part in out.device):  # no table holds them already
            of = "all" if gathered == samples else f"{gathered:,}"
            out.device.append(Part(f"embeddings of {of} samples, where they are gathered", embedding * gathered))
    except Exception as error:
        out.unknown.append(f"the survey: {config.method.name} needs values for it ({type(error).__name__})")
    work = method_without_data(config, samples, classes, ranks).working_memory()
    out.device += [Part(name, size) for name, size in work.items()]
    pictures = samples * config.data.size**2 * 3
    if Views(config.data).from_square and pictures <= KEEP_BYTES and config.data.loader == "tar":
        out.host.append(Part("decoded pictures, kept", pictures))
    out.host.append(Part("Python and its libraries", psutil.Process().memory_info().rss))
    out.unknown.append(
        "CUDA's context and libraries, the work space of convolutions, fragmentation: leave 2 to 3 GB free"
    )
    if config.model.checkpoint_activations:
        out.unknown.append("activations of the block that is being computed again")
    return out


def activations(config: Config, classes: int, ranks: int) -> tuple[int, int, int]:
    """Bytes held at the end of the largest forward pass on a rank; and its rows and views."""
    largest = (0, 0, 0)
    few = max(classes, 8 * config.data.batch)  # a step does not depend on the number of samples
    method = method_without_data(config, few, classes, ranks)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        method.to_empty(device="cpu")
    for (number, epoch, prefixes), pass_ in _passes(config, few, classes):
        method.set_epoch(number, epoch)
        method.train()
        require_gradients(method, trained_parameters(method, prefixes))
        micro = _largest_part(config, pass_, ranks)
        with mode:
            batch, *second = [_batch(config, rows, pass_) for rows in micro.parts]
            batch.second = second[0] if second else None
            with _counting(method) as counted, autocast_for(config.train.precision, CPU):
                losses = method(batch)
        images = {_storage(v): v.nbytes for part in (batch, *second) for v in part.views.values()}
        size = sum(counted.values()) + sum(size for key, size in images.items() if key not in counted)
        del losses
        rows = sum(len(part.index) for part in micro.parts)
        largest = max(largest, (size, rows, max(map(len, pass_.views_by_stream))))
    return largest


def _passes(config: Config, samples: int, classes: int) -> Iterator[tuple[tuple[int, int, tuple[str, ...]], Pass]]:
    """One pass of every kind, with (stage, epoch, prefixes of what is trained). A small network stands for the real one:
    its method decides the same, from beliefs drawn by chance so that some samples are believed and some are not.
    """
    small = config.model.model_copy(
        update={"backbone": "preact_resnet18", "width": 1, "pretrained": "", "compile": False}
    )
    given = np.arange(samples, dtype=np.int32) % classes
    data = TrainingSet(given, classes, config.seed, config.data.batch)
    method = method_class(config)(config.model_copy(update={"model": small}), data, World())
    chance = torch.Generator().manual_seed(0)
    for buffer in method.buffers(recurse=False):
        if buffer.is_floating_point() and samples in buffer.shape:
            buffer.uniform_(generator=chance)
    for number, stage in enumerate(method.stages()):
        method.set_epoch(number, max(stage.epochs - 1, 0))
        for pass_ in method.passes():
            yield (number, max(stage.epochs - 1, 0), pass_.trainable or stage.trainable), pass_


def _largest_part(config: Config, pass_: Pass, ranks: int) -> MicroBatch:
    """The first micro-batch of the rank that holds most of it."""
    data, parts = config.data, config.optim.accumulate
    held = np.sum(
        [rows.held for rows in next(micro_batches(pass_, data.batch, parts, data.mix_group, 0, ranks)).parts], 0
    )
    return next(micro_batches(pass_, data.batch, parts, data.mix_group, int(held.argmax()), ranks))


def _batch(config: Config, rows: RankBatch, pass_: Pass) -> Batch:
    n = len(rows.index)
    index = torch.empty(n, dtype=torch.long)
    views = {name: torch.empty(n, *input_shape(config)) for name in pass_.views_by_stream[rows.stream]}
    return Batch(
        index, torch.empty_like(index), torch.empty(n), views, rows.held, (0, 0, 0), torch.empty_like(index),
        learner=pass_.learner, all_valid=True,
    )  # fmt: skip


class _counting:
    """Sums the storages that autograd saves, and the inputs of blocks that will be computed again."""

    def __init__(self, method: nn.Module) -> None:
        self.method = method
        self.own = {_storage(t) for t in (*method.parameters(), *method.buffers())}
        self.counted: dict[int, int] = {}
        self.kept: list[Tensor] = []  # alive, lest another tensor gets the same address
        self.saved = torch.autograd.graph.saved_tensors_hooks(self.count, lambda tensor: tensor)

    def count(self, tensor: Tensor) -> Tensor:
        if (key := _storage(tensor)) not in self.own and key not in self.counted:
            self.counted[key] = tensor.untyped_storage().nbytes()
            self.kept.append(tensor)
        return tensor

    def __enter__(self) -> dict[int, int]:
        wrapped = [module for module in self.method.modules() if isinstance(module, CheckpointWrapper)]
        self.hooks = [module.register_forward_pre_hook(lambda _, inputs: self._inputs(inputs)) for module in wrapped]
        self.saved.__enter__()
        return self.counted

    def _inputs(self, inputs: tuple[Any, ...]) -> None:
        for value in inputs:
            if isinstance(value, Tensor) and value.requires_grad:
                self.count(value)

    def __exit__(self, *error: object) -> None:
        self.saved.__exit__(*error)
        for hook in self.hooks:
            hook.remove()


def _storage(tensor: Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)


def survey_row(config: Config, classes: int) -> tuple[int, int]:
    """Bytes that a survey keeps of each sample, and those of its embedding among them; 0 if the method takes none."""
    method = method_without_data(config, 2 * config.data.batch, classes, 1)
    if not any(_surveys(method)):
        return 0, 0
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        method.to_empty(device="cpu").eval()
        images, given = torch.empty(2, *input_shape(config)), torch.empty(2, dtype=torch.long)
        outputs = method.survey_outputs(images, given)
        rows = {name: v.numel() // 2 * (8 if v.dtype == torch.float64 else 4) for name, v in outputs.items()}
        return sum(rows.values()), rows.get("z", 0)


def _surveys(method: Method) -> Iterator[bool]:
    """Whether there is a survey, early, in the middle and late in every stage."""
    for number, stage in enumerate(method.stages()):
        for epoch in (0, 1, stage.epochs // 2, max(stage.epochs - 1, 0)):
            method.set_epoch(number, epoch)
            yield method.surveys_before_epoch() or method.surveys_after_epoch()


# -- how many samples ----------------------------------------------------------------------------------------------------

_WEBVISION = {"google": 980_449, "flickr": 1_459_125, "both": 2_439_574}
_KNOWN = {"digits": (1437, 10), "cifar10": (50_000, 10), "cifar100": (50_000, 100), "fashion_mnist": (60_000, 10)}


def size_of_data(config: BuildConfig, samples: int = 0, classes: int = 0) -> tuple[int, int, str]:
    """(N, K, where they are from): as given, else of finished shards, else of the source."""
    if samples and classes:
        return samples, classes, "as given"
    try:
        manifest = read_manifest(config.place())
        return samples or manifest.splits["train"].samples, classes or len(manifest.classes), f"from {config.place()}"
    except (UserError, OSError):
        pass
    found = _KNOWN.get(config.source)
    if config.source == "webvision":
        chosen = config.classes or 1000
        found = (_WEBVISION[config.parts] * chosen // 1000, chosen)
    if found is None:
        raise UserError(
            f"How many samples and classes source={config.source} has is known when its shards are built. Build them, or "
            "give the numbers: --estimate --samples 100000 --classes 50"
        )
    return samples or found[0], classes or found[1], f"of source={config.source}, before any long tail"


# -- what is printed -----------------------------------------------------------------------------------------------------


def print_estimate(config: Config, asked: Asked) -> int:
    samples, classes, where = size_of_data(config.shards, asked.samples, asked.classes)
    ranks = asked.ranks or int(os.environ.get("WORLD_SIZE", "1"))
    if int(os.environ.get("RANK", "0")) == 0:
        print(describe(config, estimate(config, samples, classes, ranks), where))
    return 0


def describe(config: Config, found: Estimate, where: str) -> str:
    engine = f"deepspeed, ZeRO {config.deepspeed.stage}" if config.engine == "deepspeed" else config.engine
    cut = f", in {config.optim.accumulate} parts" if config.optim.accumulate > 1 else ""
    lines = [
        f"{config.method.name}, {config.model.backbone}, {config.train.precision}, {engine}; {found.ranks} ranks, global batch "
        f"{config.data.batch}{cut}",
        f"{found.samples:,} samples, {found.classes:,} classes ({where})",
    ]
    titles = ("On the device, each rank", "In host memory, each rank", "In host memory, rank 0 besides")
    for title, parts in zip(titles, (found.device, found.host, found.main)):
        lines += ["", f"{title:<56}{_shown(sum(part.bytes for part in parts)):>12}"]
        lines += [f"  {part.name:<54}{_shown(part.bytes):>12}" for part in parts if part.bytes]
    lines += ["", "Without a GPU the first part is host memory, too.", "Not counted:"]
    return "\n".join([*lines, *(f"  {sentence}" for sentence in found.unknown)])


def _shown(size: int) -> str:
    return f"{size / GB:.2f} GB" if size >= GB / 10 else f"{size / MB:.2f} MB"
