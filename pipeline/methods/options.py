"""The options of every method, and where its code is. No torch here: a wrong option is refused before anything loads.

To add a method: one file beside this one, one block here, one test.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shards.settings import Settings

if TYPE_CHECKING:
    from pipeline.methods.base import Method

Fraction = Annotated[float, Field(ge=0, le=1)]


class CrossEntropy(Settings):
    """Plain softmax cross-entropy on the given labels."""

    code: ClassVar[str] = "cross_entropy:CrossEntropy"
    name: Literal["cross_entropy"] = "cross_entropy"


class Prototypical(Settings):
    """Prototypical Classifier: prototypes, dynamic threshold, refined labels, sample weights."""

    code: ClassVar[str] = "prototypical:Prototypical"
    name: Literal["prototypical"] = "prototypical"
    preset: Literal["paper", "released"] = Field("released", description="which reading of the weights (paper's equations, or the authors' code); the four switches below override it")
    relabel_weight: Literal["preset", "margin", "half", "one"] = Field("preset", description="weight of a sample that is not clean: (threshold-s)/2 (paper), s/2 (released), or 1 with all others (no re-weighting)")
    neighbour_rule: Literal["preset", "on", "off"] = Field("preset", description="halve the weight when the nearest sample has another refined label (released)")
    prototype_labels: Literal["preset", "given", "refined"] = Field("preset", description="labels the prototypes are averaged by")
    weighted_ce: bool = Field(True, description="after cleaning starts, weight the cross-entropy and use refined labels")
    temperature: PositiveFloat = Field(0.3, description="of all cosine softmaxes, cleaning included")
    warmup_steps: NonNegativeInt = Field(101, description="steps of cross-entropy before epoch 0, at most one pass over the data")
    cleaning_start: NonNegativeInt = Field(5, description="first epoch with cleaning")
    threshold: Literal["exponential", "linear", "fixed", "transfer"] = Field("transfer", description="course of the threshold; transfer derives start and growth from classes and epochs")
    threshold_start: PositiveFloat = Field(0.1, description="threshold at epoch 0 (not for transfer)")
    threshold_growth: PositiveFloat = Field(1.005, description="exponential: factor per epoch")
    threshold_end: PositiveFloat = Field(0.3, description="linear: value after the last epoch")
    end_cosine: Fraction = Field(0.33, description="transfer: cosine a sample needs at the end of the training")
    contrastive: NonNegativeFloat = Field(1.0, description="weight of the instance contrastive loss")
    prototype: NonNegativeFloat = Field(5.0, description="weight of the prototype loss")
    prototype_ramp: NonNegativeInt = Field(0, description="epochs in which that weight rises from 1")
    cross_entropy: NonNegativeFloat = Field(1.0, description="weight of the cross-entropy of the linear head")
    mixup: NonNegativeFloat = Field(8.0, description="Beta(a,a) of the mixing in the prototype loss; 0 = no mixing")
    mixup_views: Literal["both", "weak"] = Field("both", description="views that are mixed: weak and strong, or weak only to save memory")
    mixup_before_cleaning: bool = Field(True, description="mix from epoch 0 on (the released code starts with cleaning)")
    min_score: NonNegativeFloat = Field(0.0, description="drop samples whose largest score is not above this (0.02 in the released CIFAR-100 config)")
    cleaning: bool = Field(True, description="false: clean-data variant, no refinement, all weights 1")
    stale_prototypes: bool = Field(False, description="evaluate with the prototypes of the epoch's start, as the released code does; both are logged")
    neighbour_block: PositiveInt = Field(1024, description="rows per block of the neighbour search; bounds its memory")


MethodOptions = Annotated[CrossEntropy | Prototypical, Field(discriminator="name")]


def options_of(name: str) -> type[Settings]:
    return next(o for o in get_args(get_args(MethodOptions)[0]) if o.model_fields["name"].default == name)


def load_method(name: str) -> type[Method]:
    """The class that implements a method; this is where torch comes in."""
    module, _, cls = options_of(name).code.partition(":")  # type: ignore[attr-defined]
    return getattr(import_module(f"pipeline.methods.{module}"), cls)
