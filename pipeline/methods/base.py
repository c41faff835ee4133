"""The interface between trainer and method. The trainer depends on no method.

An epoch is  survey -> begin_epoch -> passes -> survey -> end_epoch -> evaluate.  The state of a method is in its
buffers and parameters, so a checkpoint of the module is a checkpoint of the method.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Generic, cast

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from pipeline.config import Config, OptimConfig
from pipeline.data.batch import Batch, Pass, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.options import options_of
from pipeline.methods.parts.survey import Survey
from pipeline.models.network import Average, Network, unit
from shards.base.settings import Settings

# Covariant: a Method[LDAMOptions] is a Method, and plain `Method` means Method[Settings].
Options = TypeVar("Options", bound=Settings, default=Settings, covariant=True)


@dataclass(frozen=True)
class Stage:
    """A part of the training with one optimiser and one learning-rate schedule."""

    name: str
    epochs: int = 0  # length in epochs,
    steps: int = 0  # or in steps of one pass (no survey, no evaluation)
    optim: OptimConfig | None = None  # None: that of the run
    constant_lr: bool = False
    fresh_optimizer: bool = True
    trainable: tuple[str, ...] = ("",)  # prefixes of the names of the parameters to train
    evaluated: bool = True  # False: its epochs are not evaluated, so none of them can be the best
    self_supervised: bool = False  # it learns a backbone without labels, with which all networks begin (simclr.py)


@dataclass
class Beliefs:
    """What a method believes about every training sample, by permanent index. Any part may be unknown."""

    weight: Tensor | None = None  # (N,) float
    label: Tensor | None = None  # (N,) refined label
    clean: Tensor | None = None  # (N,) bool
    score: Tensor | None = None  # (N,) float, confidence in the given label by the first head of `scores`
    other_scores: dict[str, Tensor] = field(default_factory=dict)  # the same by the other heads
    basis: tuple[Tensor, Tensor] | None = None  # (N,) labels and (N,) weights from which class centres were made
    out_of_sample: bool = False  # `score` is the probability that the label is right, by models that did not learn it
    extra: dict[str, float] = field(default_factory=dict)  # scalars to log, e.g. the threshold


class Method(nn.Module, Generic[Options]):
    """Networks, beliefs and losses of one method, with its options."""

    def __init__(self, config: Config, data: TrainingSet, world: World) -> None:
        super().__init__()
        self.config, self.data, self.world = config, data, world
        self.stoppable_world = world  # for long work that changes no state before its end; the trainer sets it
        self.options = cast(Options, config.method)  # load_method pairs the class with the options
        self.stage = 0
        self.epoch = 0
        self.tables: set[str] = set()  # buffers made by register_table
        self.growing: set[str] = set()  # buffers made by register_growing

    # -- stages and passes -----------------------------------------------------------------------------------------

    def stages(self) -> list[Stage]:
        return [Stage("train", epochs=self.config.train.epochs)]

    def set_epoch(self, stage: int, epoch: int) -> None:
        """Called before every epoch, also when a run resumes inside one. It may only set what (stage, epoch) determine."""
        self.stage, self.epoch = stage, epoch
        freeze = self.config.model.freeze
        for module in self.modules():  # those inside averages, too
            if isinstance(module, Network):
                module.frozen = freeze is True or epoch < freeze

    def surveys_before_epoch(self) -> bool:
        """Whether this epoch starts with a survey."""
        return False

    def surveys_after_epoch(self) -> bool:
        """Whether a survey is taken before evaluation; the next epoch then starts with the same survey."""
        return False

    def begin_epoch(self, survey: Survey | None) -> None:
        """Update beliefs. Called once per epoch on all ranks; not called again when resuming inside the epoch."""

    def working_memory(self) -> dict[str, int]:
        """Bytes by name that begin_epoch needs for a while on this rank, beside the survey, where that is much."""
        return {}

    def gathered_samples(self) -> int:
        """Of so many samples every rank holds the embedding for a while, where a method has embeddings in its survey."""
        return len(self.data)

    def passes(self) -> list[Pass]:
        """The passes of this epoch: a pure function of buffers, stage and epoch."""
        return [Pass(self.data.shuffled(self.order_key()))]

    def end_epoch(self, survey: Survey | None) -> None:
        """Called after the passes, before evaluation; `survey` is given if surveys_after_epoch() is true."""

    def order_key(self, pass_index: int = 0) -> int:
        """A number for (stage, epoch, pass): the key of random orders and augmentations."""
        return (self.stage * 1_000_000 + self.epoch) * 8 + pass_index

    # -- networks --------------------------------------------------------------------------------------------------

    def share_backbone(self) -> nn.Module:
        """Called once after a self-supervised stage, with whole weights: all networks begin with its backbone."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Named losses of this rank; 'loss' is the one to minimise. Their averages over ranks are global means."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Called after every optimiser step (moving averages)."""

    def survey_outputs(self, images: Tensor, given: Tensor) -> dict[str, Tensor]:
        """What the survey stores of each sample, which should be little; evaluation mode, no gradient."""
        raise NotImplementedError

    def scores(self, images: Tensor) -> dict[str, Tensor]:
        """Scores (B,K) by head; evaluation mode. The softmax of the first head is the prediction."""
        raise NotImplementedError

    def embeddings(self, images: Tensor) -> Tensor:
        """(B,D) unit vectors whose cosine is a similarity; evaluation mode. The audit finds neighbours by them."""
        raise NotImplementedError

    # -- beliefs ---------------------------------------------------------------------------------------------------

    def register_table(self, name: str, *shape: int) -> None:
        """A buffer of zeros with a row for every sample, of which this rank holds only those of `World.rank_slice`.

        A checkpoint holds the whole table. `parts.per_sample.update_table` writes rows and brings them to the ranks.
        """
        own = self.world.rank_slice(len(self.data))
        self.register_buffer(name, torch.zeros(own.stop - own.start, *shape))
        self.tables.add(name)

    def register_growing(self, name: str, *shape: int) -> None:
        """A buffer with rows for some of the samples, none at first. The method replaces it when it knows how many."""
        self.register_buffer(name, torch.zeros(0, *shape))
        self.growing.add(name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Of a whole table take the own rows; make room for the rows of growing buffers."""
        for name in self.growing & {key.removeprefix(prefix) for key in state_dict}:
            buffer = self.get_buffer(name)
            setattr(self, name, buffer.new_empty(len(state_dict[prefix + name]), *buffer.shape[1:]))
        for key in {prefix + name for name in self.tables} & state_dict.keys():
            if len(state_dict[key]) == len(self.data):
                state_dict[key] = state_dict[key][self.world.rank_slice(len(self.data))]
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def beliefs(self) -> Beliefs | None:
        """What is believed in this epoch, read by all ranks together. Reading changes nothing. Parts that are no buffers
        are None after a restart."""
        return None


class OneNetwork(Method[Options]):
    """A method with one network and, if asked for, a moving average of it that is evaluated."""

    def __init__(
        self, config: Config, data: TrainingSet, world: World, embed: bool = False, cosine: bool = False
    ) -> None:
        super().__init__(config, data, world)
        self.network = Network(config.model, data.classes, world, embed, cosine)
        self.average = Average(self.network, config.model.ema) if config.model.ema else None

    @property
    def eval_network(self) -> Network:
        """The network used for survey, evaluation and prediction."""
        return self.network if self.average is None else self.average.network

    def after_step(self) -> None:
        if self.average is not None:
            self.average.update(self.network)

    def scores(self, images: Tensor) -> dict[str, Tensor]:
        return {"linear": self.eval_network(images)[1].float()}

    def embeddings(self, images: Tensor) -> Tensor:
        return unit(self.eval_network(images)[0])


def load_method(name: str) -> type[Method]:
    """The class that implements a method."""
    module, _, cls = options_of(name).code.partition(":")  # type: ignore[attr-defined]
    method: type[Method] = getattr(import_module(f"pipeline.methods.{module}"), cls)
    return method
