"""Every setting of a training run, typed; torch is not needed to read or refuse one.

A config file may carry `recipes`: per method, the settings its own paper asks for on this data. They lie between the
file and the command line:  defaults < file < recipes[method] < key=value.  With `recipe=common` only the `method:` part of a
recipe counts, so that all methods share one budget (epochs, batch, optimiser) and differ in nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from pipeline.methods.options import EvenhandOptions, Fraction, MethodOptions
from shards.base import cli, settings
from shards.base.errors import UserError
from shards.base.settings import Input, NoEffect, Settings, Tree
from shards.config import BuildConfig, CacheConfig, refuse_unasked_bias

PROG = "python -m pipeline.train"
ABOUT = """Train an image classifier on shards whose labels may be wrong and whose classes are long-tailed.

This starts one rank. For more: torchrun --nproc_per_node=8 --standalone -m pipeline.train [key=value ...]"""
SIMCLR = "simclr"  # of model.start
CONFIGS = Path(__file__).parent / "configs"  # a link to configs/ in the source tree, a folder in the installed package


def _weights_place(value: object) -> object:
    """YAML has true and false, the command line has words."""
    text = str(value).lower()
    return {"true": "true", "false": ""}.get(text, value)


WeightsPlace = Annotated[str, BeforeValidator(_weights_place)]


class DataConfig(Settings):
    batch: PositiveInt = Field(64, description="global batch: pictures per step over all ranks together")
    eval_batch: NoEffect[NonNegativeInt] = Field(0, description="pictures per rank at a time in surveys, evaluation, audit and prediction; 0 = a rank's part of data.batch, at least 64")
    size: PositiveInt = Field(16, description="side of the square picture the network sees; with model.pretrained the default of size, resize, interpolation, mean and std is what the weights expect")
    crop: Literal["pad", "resized"] = Field("pad", description="weak view: shifted crop of a padded picture (CIFAR) or random resized crop (web photographs)")
    padding: NonNegativeInt = Field(2, description="pixels of padding for crop=pad")
    area: tuple[Fraction, Fraction] = Field((0.4, 1.0), description="share of the picture's area for crop=resized")
    contrast_area: tuple[Fraction, Fraction] = Field((0.2, 1.0), description="model.start=simclr: share of the picture's area in its crops")
    flip: bool = Field(False, description="mirror half of the pictures (wrong for digits and other text)")
    resize: NonNegativeInt = Field(0, description="test transform: short side before the centre crop; 0 = same as size")
    interpolation: Literal["bilinear", "bicubic"] = Field("bilinear", description="how pictures and crops are resized, antialiased when they shrink")
    mean: tuple[float, float, float] = Field((0.5, 0.5, 0.5), description="channel means of the pictures, for values in 0..1")
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = Field((0.5, 0.5, 0.5), description="channel deviations")
    augmix: Literal["released", "original", "none"] = Field("released", description="strong view: AugMix as in the authors' code (one chain), as published (three chains), or none")
    augmix_severity: PositiveFloat = Field(1.0, description="largest AugMix level")
    strong_mean: tuple[float, float, float] | None = Field(None, description="another mean for the strong view (the released code uses CIFAR-10's on CIFAR-100)")
    strong_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] | None = Field(None, description="another deviation for the strong view")
    loader: NoEffect[Literal["tar", "ffcv", "features"]] = Field("tar", description="what to read: webdataset tars, the FFCV file, or features of the frozen backbone, which are computed once")
    features: Input[str] = Field("", description="loader=features: folder or URL of the stored features; empty = beside the shards")
    feature_views: NonNegativeInt = Field(4, description="loader=features: weak and strong views stored of every training sample; 0 = the test view stands for both")
    threads: NoEffect[PositiveInt] = Field(2, description="decoding threads per rank")
    prefetch: NoEffect[PositiveInt] = Field(4, description="batches prepared ahead")
    mix_group: PositiveInt = Field(8, description="mixup partners are drawn inside groups of at most this many neighbours of the shuffled order; groups never cross ranks, so a small batch has smaller ones (an eighth of a micro-batch, at least 2)")
    shuffle_window: NonNegativeInt = Field(0, description="shuffle inside windows of this many shards, for data larger than the local cache; 0 = whole set")
    cache: CacheConfig = CacheConfig()
    max_bad: NoEffect[Fraction] = Field(0.01, description="share of pictures that may fail to decode in an epoch before the run stops")

    def eval_rows(self, ranks: int) -> int:
        """Pictures per rank at a time where no gradient is taken.

        A training batch divided among many ranks leaves a few on each, too few to keep a GPU busy. More fit than in
        training, because activations are not kept for a backward pass.
        """
        return self.eval_batch or max(64, self.batch // ranks)


class ModelConfig(Settings):
    backbone: str = Field("preact_resnet18", description="preact_resnet18, or the name of a timm model such as inception_resnet_v2, perhaps with the tag of its weights: resnet50.a1_in1k")
    width: PositiveInt = Field(8, description="channels of the first stage of preact_resnet18 (64 in the paper)")
    norm: Literal["batch", "group"] = Field("batch", description="normalisation of preact_resnet18; group needs no batch statistics")
    embedding: PositiveInt = Field(50, description="width of the embedding on the unit sphere")
    pretrained: Input[WeightsPlace] = Field("", description="weights of the backbone: true (those timm publishes), or a file or URL (.safetensors, .pth, .pt, .bin); empty or false = none")
    start: Input[str] = Field("", description="simclr: the backbone first learns without labels from the same pictures, see docs/methods.md; or the folder of another run to start from: its backbone, head and, on the same shards, its beliefs")
    start_part: NonNegativeFloat = Field(0.0, description="start=simclr: its length as a part of train.epochs, besides these; 0.5 if it is not set")
    start_temperature: PositiveFloat = Field(0.5, description="start=simclr: temperature of its loss")
    feature_norm: Literal["none", "power", "root", "batch"] = Field("none", description="what head and projector see: the backbone's features; their signed powers of 0.7 scaled to length one; the same with square roots; or the latter normalised over the batch besides")
    from_features: bool = Field(False, description="the network starts from stored features instead of pictures; set by data.loader=features")
    ema: Fraction = Field(0.0, description="decay of an average of the weights used for survey and evaluation; 0 = off")
    freeze: bool | NonNegativeInt = Field(False, description="true: the backbone rests, weights and batch statistics; a number: for so many first epochs of each stage. See docs/finetuning.md")
    freeze_statistics: bool = Field(False, description="batch normalisations of the backbone use and keep their running statistics while its weights learn; for fine-tuning on few pictures")
    checkpoint_activations: NoEffect[bool] = Field(False, description="recompute activations in the backward pass to save memory")
    channels_last: NoEffect[bool] = Field(False, description="memory layout that tensor cores prefer")
    compile: NoEffect[bool] = Field(False, description="torch.compile the backbone")
    sync_batchnorm: bool = Field(True, description="batch statistics of the whole global batch, on any number of ranks; false: each rank has its own")

    @model_validator(mode="before")
    @classmethod
    def _has_a_start_of_some_length(cls, tree: Any) -> Any:
        """`start` may change on resume, since a folder may move. That there is a self-supervised stage may not: its length says so."""
        if not isinstance(tree, dict) or tree.get("start") != SIMCLR:
            return tree
        return {"start_part": 0.5, **tree}

    @model_validator(mode="after")
    def _start_fits(self) -> ModelConfig:
        if self.start == SIMCLR and not self.start_part:
            raise ValueError("start=simclr with start_part=0 has no length; raise model.start_part or leave out model.start")
        if self.start_part and self.start != SIMCLR:
            raise ValueError("start_part is the length of a self-supervised start; set model.start=simclr or leave out model.start_part")
        if self.start == SIMCLR and self.freeze is True:
            raise ValueError("start=simclr trains the backbone, which freeze=true forbids; for a frozen one give the backbone.safetensors of a run with start=simclr as model.pretrained")
        return self


class OptimConfig(Settings):
    name: Literal["sgd", "adamw"] = Field("sgd", description="SGD with momentum, or AdamW")
    lr: PositiveFloat = Field(0.05, description="initial learning rate for the global batch")
    momentum: Fraction = Field(0.9, description="sgd: momentum")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="adamw: decays of the averages of the gradient and of its square")
    weight_decay: NonNegativeFloat = Field(5e-4, description="sgd: L2 penalty on weights; adamw: decay decoupled from the gradient")
    decay_norms: bool = Field(True, description="false: no weight decay for normalisations and biases (parameters of one dimension)")
    backbone_scale: PositiveFloat = Field(1.0, description="factor on the learning rate of the backbone")
    layer_decay: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="factor on the learning rate from block to block of the backbone, from the last to the first")
    schedule: Literal["cosine", "steps", "restarts", "constant"] = Field("cosine", description="learning-rate schedule")
    schedule_by: Literal["epoch", "step"] = Field("epoch", description="whether the learning rate changes every epoch or every step")
    final_lr: NonNegativeFloat = Field(2e-4, description="where cosine and restarts end")
    milestones: tuple[Fraction, ...] = Field((), description="schedule=steps: parts of the training after which lr is multiplied by decay")
    decay: PositiveFloat = Field(0.1, description="factor at each milestone")
    restart_epochs: PositiveInt = Field(10, description="schedule=restarts: epochs of one cosine cycle")
    warmup_epochs: NonNegativeInt | NonNegativeFloat = Field(0, description="epochs of linear increase to lr; schedule_by=step: may be a fraction")
    clip: NonNegativeFloat = Field(0.0, description="largest gradient norm; 0 = no clipping")
    accumulate: PositiveInt = Field(1, description="micro-batches a global batch is cut into to save memory; exact for cross-entropy only, see docs/methods.md")


class TrainConfig(Settings):
    epochs: PositiveInt = Field(50, description="epochs of the main stage")
    evaluate_every: PositiveInt = Field(1, description="epochs from one evaluation on the held-out splits to the next; the last epoch always has one. Best and the mean of the last ten know these epochs only")
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="fp32, bf16 autocast, or fp16 with a loss scaler")
    tf32: bool = Field(True, description="CUDA: convolutions in fp32 may round to TF32, which is several times as fast; matrix products never do")
    deterministic: NoEffect[bool] = Field(False, description="CUDA: two runs agree in every bit, at a lower speed; CPUs need no setting for it")
    device: NoEffect[Literal["auto", "cpu", "cuda"]] = Field("auto", description="auto takes CUDA where there is one, and refuses a GPU that torch cannot use")
    log_every: NoEffect[PositiveInt] = Field(20, description="steps between lines of the log with the loss, and between checks for a gradient that is not finite")
    timeout: NoEffect[PositiveFloat] = Field(600.0, description="seconds a collective may take before the job ends")
    max_bad_steps: NoEffect[NonNegativeInt] = Field(5, description="skipped steps in a row (gradient not finite) before the run stops")
    deadline_minutes: NoEffect[NonNegativeFloat] = Field(0.0, description="stop cleanly, resumable, after this long; 0 = never")
    stop_file: NoEffect[str] = Field("", description="stop cleanly, resumable, when this file appears; empty = OUTPUT/stop")
    sample_log: NoEffect[bool] = Field(False, description="write the index of every sample seen to OUTPUT/samples-rankR.jsonl")


class CheckpointConfig(Settings):
    url: NoEffect[str] = Field("", description="folder or fsspec URL; empty = OUTPUT/checkpoints")
    every_epochs: NoEffect[NonNegativeInt] = Field(1, description="save after this many epochs; 0 = only at the end and when stopped")
    every_steps: NoEffect[NonNegativeInt] = Field(0, description="also save after this many steps; 0 = off")
    every_minutes: NoEffect[NonNegativeFloat] = Field(0.0, description="also save after this many minutes; 0 = off")
    keep: NoEffect[Annotated[int, Field(ge=2)]] = Field(3, description="how many of the newest to keep (the best is kept besides)")
    background: NoEffect[bool] = Field(True, description="write while training goes on")


class TrackingConfig(Settings):
    uri: NoEffect[str] = Field("sqlite:///runs/mlflow.db", description="MLflow tracking URI; empty = journal only; MLFLOW_TRACKING_URI counts where neither file nor command line sets it")
    experiment: NoEffect[str] = Field("evenhand", description="MLflow experiment; MLFLOW_EXPERIMENT_NAME counts where neither file nor command line sets it")
    run_name: NoEffect[str] = Field("", description="empty = method, what a sweep varies, seed, data set and its injected bias")
    parent: NoEffect[str] = Field("", description="run id of the sweep this run belongs to")
    tags: NoEffect[dict[str, str]] = Field({}, description="further tags")
    log_model: NoEffect[bool] = Field(True, description="log the final model as an MLflow model")
    register_as: NoEffect[str] = Field("", description="also register the model under this name")
    system_metrics: NoEffect[bool] = Field(True, description="log CPU, memory and GPU use")


class DeepSpeedConfig(Settings):
    stage: NoEffect[Literal[0, 1, 2, 3]] = Field(1, description="ZeRO stage")
    config: Input[str] = Field("", description="your own DeepSpeed JSON; its keys win over the block made here")


class Config(Settings):
    seed: NonNegativeInt = Field(0, description="of weights, order and augmentation; the bias of the data has shards.bias_seed")
    output: NoEffect[str] = Field("", description="folder of the run; empty = runs/ and a readable name")
    recipe: Literal["own", "common"] = Field("own", description="the method's own settings from the file's recipes, or one budget for all")
    engine: NoEffect[Literal["ddp", "deepspeed"]] = Field("ddp", description="what runs the optimiser step")
    table_cell: NoEffect[str] = Field("", description="table of the paper this run belongs to, for the report")
    shards: NoEffect[BuildConfig] = BuildConfig()  # the manifest's hash, not these settings, says which data it is
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: MethodOptions = EvenhandOptions()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()

    @model_validator(mode="before")
    @classmethod
    def _knows_what_it_starts_from(cls, tree: Any) -> Any:
        """data.loader has no effect on the result but for this, which `model` records."""
        if not isinstance(tree, dict) or not isinstance(tree.get("data") or {}, dict | Settings):
            return tree
        data, model = tree.get("data") or {}, tree.get("model") or {}
        data, model = (part.model_dump() if isinstance(part, Settings) else part for part in (data, model))
        if not isinstance(model, dict):
            return tree
        return {**tree, "model": {**model, "from_features": data.get("loader") == "features"}}

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        if self.optim.accumulate > self.data.batch:
            raise ValueError("optim.accumulate cuts the batch into more parts than it has pictures; lower it or raise data.batch")
        if self.optim.schedule_by == "epoch" and self.optim.warmup_epochs % 1:
            raise ValueError("optim.warmup_epochs is no whole number; round it, or set optim.schedule_by=step")
        if max(self.optim.betas) == 1:
            raise ValueError("optim.betas must be below 1, for example optim.betas=[0.9, 0.999]")
        for name in ("area", "contrast_area"):
            low, high = getattr(self.data, name)
            if low > high:
                raise ValueError(f"data.{name} must be (smallest, largest)")
        if self.model.start == SIMCLR and self.model.from_features:
            raise ValueError("model.start=simclr trains the backbone, and data.loader=features has a frozen one with nothing to learn; set data.loader=tar or leave out model.start")
        return self


def combine(file_tree: Tree, overrides: Tree) -> Tree:
    """The file, the recipe of the chosen method, then the command line."""
    file_tree = dict(file_tree)
    recipes: Any = file_tree.pop("recipes", None) or {}
    if not isinstance(recipes, dict):
        raise UserError("recipes: must hold one block per method name.")
    chosen = settings.merge(file_tree, overrides)
    name = _section(chosen, "method").get("name", EvenhandOptions().name)
    recipe = _section(recipes, name)
    if chosen.get("recipe", "own") == "common":
        recipe = {"method": _section(recipe, "method")}
    of_file = _section(file_tree, "method")
    if of_file.get("name", name) != name:  # the file's options belong to another method
        of_file = {}
    tree = settings.merge(settings.merge(file_tree, {**recipe, "method": {}}), overrides)
    tree["tracking"] = {**tracking_environment(), **_section(tree, "tracking")}
    options = settings.merge(settings.merge(of_file, _section(recipe, "method")), _section(overrides, "method"))
    refuse_unasked_bias(_section(tree, "shards"), _section(overrides, "shards"), "shards.")
    return {**tree, "method": {**options, "name": name}}


def tracking_environment() -> dict[str, str]:
    """Settings of tracking from the environment, below file and command line. Every command asks here."""
    names = {"uri": "MLFLOW_TRACKING_URI", "experiment": "MLFLOW_EXPERIMENT_NAME"}
    return {key: value for key, name in names.items() if (value := os.environ.get(name, ""))}


def _section(tree: Tree, key: str) -> Tree:
    part = tree.get(key) or {}
    if not isinstance(part, dict):
        raise UserError(f"{key}: holds settings of its own, for example {key}.name=prototypical.")
    return part


OPTIONS = (
    ("--estimate", "print how much memory the run would need on each rank, and do nothing else; beside it:"),
    ("--ranks", "for so many ranks; WORLD_SIZE or 1 without it"),
    ("--samples", "for so many samples; those of the shards or of the source without it"),
    ("--classes", "for so many classes"),
)
COMMAND = cli.Command(PROG, ABOUT, Config, combine=combine, configs=CONFIGS, options=OPTIONS)


class Asked(NamedTuple):
    """What stood beside --estimate; 0: nothing."""

    ranks: int = 0
    samples: int = 0
    classes: int = 0


def take_estimate(argv: list[str]) -> tuple[Asked | None, list[str]]:
    """What --estimate asks for (None: it is not there), and the other words."""
    if "--estimate" not in argv:
        return None, argv
    numbers: dict[str, int] = {}
    rest: list[str] = []
    words = iter(word for word in argv if word != "--estimate")
    for word in words:
        name, _, value = word.partition("=")
        if name not in dict(OPTIONS):
            rest.append(word)
            continue
        value = value or next(words, "")
        if not value.isdecimal() or not int(value):
            raise UserError(f"{name} needs a number: --estimate {name} 8")
        numbers[name.lstrip("-")] = int(value)
    return Asked(**numbers), rest


def load(argv: list[str]) -> Config:
    """The settings of a run from its command line."""
    return COMMAND.load(argv)
