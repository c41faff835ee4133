"""The options of every method, and where its code is. No torch here: a wrong option is refused before torch is imported.

To add a method: one file beside this one, one block here, one test.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shards.base.settings import NoEffect, Settings

Fraction = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]  # so that probability 1 is above the bound


class CrossEntropyOptions(Settings):
    """Plain softmax cross-entropy on the given labels."""

    code: ClassVar[str] = "cross_entropy:CrossEntropy"
    name: Literal["cross_entropy"] = "cross_entropy"


class PrototypicalOptions(Settings):
    """Prototypical Classifier: prototypes, dynamic threshold, refined labels, sample weights."""

    code: ClassVar[str] = "prototypical:Prototypical"
    name: Literal["prototypical"] = "prototypical"
    preset: Literal["paper", "released"] = Field("released", description="which reading of the weights (paper's equations, or the authors' code); the four switches below override it")
    relabel_weight: Literal["preset", "margin", "half", "one"] = Field("preset", description="weight of a sample that is not clean: (threshold-s)/2 (paper), s/2 (released), or 1 with all others (no re-weighting)")
    neighbour_rule: bool | None = Field(None, description="halve the weight when the nearest sample has another refined label; none = as the preset says (released: yes)")
    prototype_labels: Literal["preset", "given", "refined"] = Field("preset", description="labels the prototypes are averaged by")
    weighted_ce: bool = Field(True, description="after cleaning starts, weight the cross-entropy and use refined labels")
    temperature: PositiveFloat = Field(0.3, description="of all cosine softmaxes, cleaning included")
    warmup_steps: NonNegativeInt = Field(101, description="steps of cross-entropy before epoch 0, at most one pass over the data")
    cleaning_start: Fraction = Field(0.1, description="part of the training before labels are cleaned")
    threshold: Literal["exponential", "linear", "fixed", "transfer"] = Field("transfer", description="schedule of the threshold; transfer derives start and growth from classes and epochs")
    threshold_start: PositiveFloat = Field(0.1, description="threshold at epoch 0 (not for transfer)")
    threshold_growth: PositiveFloat = Field(1.005, description="exponential: factor per epoch")
    threshold_end: PositiveFloat = Field(0.3, description="linear: value after the last epoch")
    end_cosine: Fraction = Field(0.33, description="transfer: cosine a sample needs at the end of the training")
    contrastive: NonNegativeFloat = Field(1.0, description="weight of the instance contrastive loss")
    prototype: NonNegativeFloat = Field(5.0, description="weight of the prototype loss")
    prototype_ramp: Fraction = Field(0.0, description="part of the training in which that weight rises from 1")
    cross_entropy: NonNegativeFloat = Field(1.0, description="weight of the cross-entropy of the linear head")
    mixup: NonNegativeFloat = Field(8.0, description="Beta(a,a) of the mixing in the prototype loss; 0 = no mixing")
    mixup_views: Literal["both", "weak"] = Field("both", description="views that are mixed: weak and strong, or weak only to save memory")
    mixup_before_cleaning: bool = Field(True, description="mix from epoch 0 on (the released code starts with cleaning)")
    min_score: NonNegativeFloat = Field(0.0, description="drop samples whose largest score is not above this (0.02 in the released CIFAR-100 config)")
    cleaning: bool = Field(True, description="false: clean-data variant, no refinement, all weights 1")
    stale_prototypes: bool = Field(False, description="evaluate with the prototypes of the epoch's start, as the released code does; both are logged")
    neighbour_block: NoEffect[PositiveInt] = Field(1024, description="rows per block of the neighbour search; bounds its memory")


class LDAMOptions(Settings):
    """Label-distribution-aware margins: larger margins for rarer classes."""

    code: ClassVar[str] = "ldam:LDAM"
    name: Literal["ldam"] = "ldam"
    max_margin: NonNegativeFloat = Field(0.5, description="margin of the rarest class, as a cosine")
    scale: PositiveFloat = Field(30.0, description="factor on the cosines")


class LDAMDRWOptions(LDAMOptions):
    """LDAM with deferred re-weighting of the classes."""

    code: ClassVar[str] = "ldam:LDAMDRW"
    name: Literal["ldam_drw"] = "ldam_drw"  # type: ignore[assignment]
    reweight_start: Fraction = Field(0.8, description="part of the training after which classes are weighted")
    beta: Fraction = Field(0.9999, description="of the effective number of samples (1 - beta^n) / (1 - beta)")


class CRTOptions(Settings):
    """Classifier re-training: representation from all samples, then a new classifier from class-balanced ones."""

    code: ClassVar[str] = "decoupling:CRT"
    name: Literal["crt"] = "crt"
    classifier_part: Fraction = Field(0.05, description="length of the second stage, as a part of train.epochs; at least one epoch")
    classifier_lr: PositiveFloat = Field(0.1, description="initial learning rate of the second stage; cosine to zero")
    classifier_weight_decay: NonNegativeFloat = Field(5e-4, description="weight decay of the second stage")


class NCMOptions(CrossEntropyOptions):
    """Nearest class mean over the features of a network trained by cross-entropy."""

    code: ClassVar[str] = "decoupling:NCM"
    name: Literal["ncm"] = "ncm"  # type: ignore[assignment]


class CoTeachingOptions(Settings):
    """Two networks, each trained on the samples of small loss of the other."""

    code: ClassVar[str] = "coteaching:CoTeaching"
    name: Literal["coteaching"] = "coteaching"
    noise_rate: Fraction | None = Field(None, description="share of samples to drop in the end; empty = estimated by a mixture over the losses")
    ramp: Fraction = Field(0.05, description="part of the training in which the dropped share rises from zero")


class MentorNetOptions(Settings):
    """MentorNet with its predefined curriculum, as a rule in closed form."""

    code: ClassVar[str] = "mentornet:MentorNet"
    name: Literal["mentornet"] = "mentornet"
    percentile: Fraction = Field(0.75, description="of a batch's losses; samples above its moving average are left out")
    decay: Fraction = Field(0.5, description="of the moving percentile")
    burn_in: Fraction = Field(0.18, description="part of the training in which all weights are 1")
    soft_start: Fraction = Field(0.9, description="part after which weights fall linearly beyond the percentile instead of at once")
    soft_width: PositiveFloat = Field(1.0, description="loss beyond the percentile at which such a weight is zero")
    dropout: Fraction = Field(0.5, description="probability that a sample is left out of a step, early")
    dropout_part: Fraction = Field(0.17, description="part of the training that is early")
    dropout_late: Fraction = Field(0.05, description="that probability afterwards")


class ELROptions(Settings):
    """Early-learning regularisation: stay close to the predictions made before wrong labels were memorised."""

    code: ClassVar[str] = "elr:ELR"
    name: Literal["elr"] = "elr"
    beta: Fraction = Field(0.7, description="memory of earlier predictions")
    strength: NonNegativeFloat = Field(3.0, description="weight of the regulariser")


class ELRPlusOptions(ELROptions):
    """ELR with two networks that keep the memory for each other, averaged weights and mixup."""

    code: ClassVar[str] = "elr:ELRPlus"
    name: Literal["elr_plus"] = "elr_plus"  # type: ignore[assignment]
    ema: Annotated[float, Field(gt=0, lt=1)] = Field(0.997, description="decay of the averaged weights that make the memory")
    ema_ramp: Fraction = Field(0.0, description="part of the training in which that decay rises; 0 = a true average at first")
    mixup: NonNegativeFloat = Field(1.0, description="Beta(a,a) of the mixing; 0 = no mixing")
    ramp: Fraction = Field(0.0, description="part of the training in which the regulariser rises; 0 = there from the start")
    remembered_targets: bool = Field(False, description="multiply the labels by the memory (the authors do so on CIFAR-100)")


class HAROptions(Settings):
    """Heteroskedastic adaptive regularisation: rare and uncertain classes are smoothed more."""

    code: ClassVar[str] = "har:HAR"
    name: Literal["har"] = "har"
    strength: NonNegativeFloat = Field(10.0, description="weight of the regulariser")
    probe_part: Fraction = Field(1.0, description="length of the first training, on half of the samples, as a part of train.epochs; at least one epoch")
    error_power: NonNegativeFloat = Field(0.6, description="class strength = error^this / count^the other")
    count_power: NonNegativeFloat = Field(0.4, description="see error_power")
    reweight_start: Fraction = Field(0.667, description="part of the main training after which classes are weighted; 1 = never")
    beta: Fraction = Field(0.9999, description="of the effective number of samples (1 - beta^n) / (1 - beta)")


class AUMOptions(Settings):
    """Area under the margin: samples no better than deliberately mislabelled ones are left out of the training."""

    code: ClassVar[str] = "aum:AUM"
    name: Literal["aum"] = "aum"
    probe_part: Fraction = Field(0.5, description="length of each of the two measuring runs, as a part of train.epochs; at least one epoch")
    percentile: Fraction = Field(0.99, description="of the mislabelled samples' margins; samples below it are left out")


class DivideMixOptions(Settings):
    """Two networks; a mixture over the losses of one selects the labels the other keeps, the rest is semi-supervised."""

    code: ClassVar[str] = "dividemix:DivideMix"
    name: Literal["dividemix"] = "dividemix"
    warmup: Fraction = Field(0.167, description="part of the training by cross-entropy alone")
    warmup_batch: PositiveInt = Field(2, description="batch of the warm-up, in multiples of data.batch")
    threshold: BelowOne = Field(0.5, description="a label is kept when its probability to be right is above this")
    sharpening: PositiveFloat = Field(0.5, description="temperature of guessed labels; 1 leaves them as they are")
    mixup: NonNegativeFloat = Field(4.0, description="Beta(a,a) of the mixing; 0 = no mixing")
    unlabelled: NonNegativeFloat = Field(25.0, description="weight of the loss on samples without a label; 0 = they are mixing partners only")
    unlabelled_ramp: Fraction = Field(0.053, description="part of the training in which that weight rises from zero, after the warm-up")
    penalty: NonNegativeFloat = Field(1.0, description="weight of the penalty on a mean prediction that is not uniform")
    loss_epochs: PositiveInt = Field(1, description="epochs whose losses are averaged before the mixture is fitted (5 for very noisy labels)")


class RoLTOptions(DivideMixOptions):
    """RoLT+: DivideMix, dividing each class by the distance of its samples to the class centroid."""

    code: ClassVar[str] = "rolt:RoLT"
    name: Literal["rolt"] = "rolt"  # type: ignore[assignment]
    loss_epochs: Literal[1] = Field(1, description="no losses are averaged here")
    reweight_start: Fraction = Field(1.0, description="part of the training after which classes are weighted by effective number; 1 = never")
    beta: Fraction = Field(0.9999, description="of the effective number of samples (1 - beta^n) / (1 - beta)")


class SFAOptions(RoLTOptions):
    """Stochastic feature averaging: RoLT+ with centroids averaged over epochs, and a second, class-balanced classifier."""

    code: ClassVar[str] = "sfa:SFA"
    name: Literal["sfa"] = "sfa"  # type: ignore[assignment]
    warmup: Fraction = Field(0.15, description="part of the training by cross-entropy alone")
    unlabelled_ramp: Fraction = Field(0.08, description="part of the training in which the weight of unlabelled samples rises from zero, after the warm-up")
    candidate_growth: PositiveFloat = Field(2.71, description="samples count for a centroid when the balanced classifier gives their label more than 1/classes times this by the end of the training")
    averaging: Fraction = Field(0.99, description="decay of the averages of centroids and of their squares")
    sampled_above: NonNegativeInt = Field(300, description="classes with more candidates have their centroid drawn from a Gaussian instead of the average")


class DaSCOptions(DivideMixOptions):
    """Distribution-aware selection and contrast: DivideMix by class centres that all samples make by their predictions."""

    code: ClassVar[str] = "dasc:DaSC"
    name: Literal["dasc"] = "dasc"  # type: ignore[assignment]
    loss_epochs: Literal[1] = Field(1, description="no losses are averaged here")
    warmup: Fraction = Field(0.3, description="part of the training on the given labels alone")
    unlabelled_ramp: Fraction = Field(0.16, description="part of the training in which the weight of unlabelled samples rises from zero, after the warm-up")
    candidate_growth: PositiveFloat = Field(1.65, description="samples count for the centres when both classifiers are surer than 1/classes times this by the end of the training")
    temperature: PositiveFloat = Field(0.1, description="of the predictions that weigh samples in centres, and of the balanced contrast")
    contrast_start: Fraction = Field(0.1, description="part of the training before the contrast begins, at the latest after the warm-up")
    confident_above: Fraction = Field(0.9, description="samples with a target above this learn the balanced contrast, those below to know themselves again")
    balanced_contrast: NonNegativeFloat = Field(0.5, description="weight of the balanced supervised contrast")
    discrimination: NonNegativeFloat = Field(0.3, description="weight of the contrast of a sample with itself")
    discrimination_temperature: PositiveFloat = Field(0.5, description="its temperature")
    queue: PositiveInt = Field(1024, description="keys of mixed pictures that it is contrasted against, for each network; at least those of a step")
    projection: PositiveInt = Field(128, description="width in which samples are compared")


class RRLOptions(Settings):
    """Robust representation learning: labels smoothed over neighbours in the embedding; the base of Prototypical."""

    code: ClassVar[str] = "rrl:RRL"
    name: Literal["rrl"] = "rrl"
    temperature: PositiveFloat = Field(0.3, description="of all cosine softmaxes and of the neighbours' weights")
    warmup_steps: NonNegativeInt = Field(101, description="steps of cross-entropy before epoch 0, at most one pass over the data")
    cleaning_start: Fraction = Field(0.025, description="part of the training before labels are cleaned")
    neighbours: PositiveInt = Field(200, description="number of neighbours per sample (all others, if there are fewer)")
    keep_above: Fraction = Field(0.1, description="a given label is kept when its score is above this")
    use_above: BelowOne = Field(0.9, description="a sample has a label at all when its largest score is above this")
    contrastive: NonNegativeFloat = Field(1.0, description="weight of the instance contrastive loss")
    prototype: NonNegativeFloat = Field(5.0, description="weight of the prototype loss")
    prototype_ramp: Fraction = Field(0.0, description="part of the training in which that weight rises from 1")
    reconstruction: NonNegativeFloat = Field(1.0, description="weight of the reconstruction of features from embeddings")
    mixup: NonNegativeFloat = Field(8.0, description="Beta(a,a) of the mixing in the prototype loss; 0 = no mixing")
    mixup_views: Literal["both", "weak"] = Field("both", description="views that are mixed: weak and strong, or weak only to save memory")
    neighbour_block: NoEffect[PositiveInt] = Field(256, description="rows per block of the neighbour search; bounds its memory")


class MoProOptions(Settings):
    """Momentum prototypes: labels corrected in every step by prototypes that move with the network."""

    code: ClassVar[str] = "mopro:MoPro"
    name: Literal["mopro"] = "mopro"
    temperature: PositiveFloat = Field(0.1, description="of all cosine softmaxes")
    momentum: Fraction = Field(0.999, description="decay of the averaged network that makes the keys")
    prototype_momentum: Fraction = Field(0.999, description="decay of the prototypes, per sample")
    queue: PositiveInt = Field(8192, description="keys kept as negatives; at least data.batch, and better fewer than the samples")
    contrastive: NonNegativeFloat = Field(1.0, description="weight of the instance contrastive loss")
    prototype: NonNegativeFloat = Field(1.0, description="weight of the prototype contrastive loss")
    cleaning_start: Fraction = Field(0.122, description="part of the training before labels are corrected")
    relabel_above: Fraction = Field(0.8, description="a sample takes its likeliest class when that class scores above this")
    classifier_weight: Fraction = Field(0.5, description="share of the classifier in a score; the rest is the prototypes'")
    retrain_part: Fraction = Field(0.167, description="length of the last stage, the classifier alone on class-balanced corrected labels, as a part of train.epochs; 0 = none")
    retrain_lr: PositiveFloat = Field(0.01, description="initial learning rate of that stage; a tenth after each third")


class SelectionOptions(Settings):
    """Of methods that select samples and train on these, drawn class-balanced."""

    mixup: NonNegativeFloat = Field(4.0, description="Beta(a,a) of the mixing of selected samples; 0 = no mixing")
    consistency: NonNegativeFloat = Field(1.0, description="weight of the agreement between the views of all samples; 0 = none, so that only selected samples pass the network")
    projection: PositiveInt = Field(128, description="width in which the views are compared")
    neighbour_block: NoEffect[PositiveInt] = Field(1024, description="rows per block of the neighbour search; bounds its memory")


class SSROptions(SelectionOptions):
    """SSR+: confident predictions replace labels, neighbours confirm them, confirmed samples are drawn class-balanced."""

    code: ClassVar[str] = "ssr:SSR"
    name: Literal["ssr"] = "ssr"
    relabel_above: Fraction = Field(0.9, description="a sample takes its likeliest class when the classifier gives it more than this; 1 = never")
    select_from: Fraction = Field(1.0, description="a sample is selected when its label has at least this part of the votes of the class with most")
    neighbours: PositiveInt = Field(200, description="samples that vote, the sample itself among them (all, if there are fewer)")


class PLSLSAOptions(Settings):
    """PLS-LSA, one network: losses and a linear separation find wrong labels in turn; their pseudo-labels count by trust."""

    code: ClassVar[str] = "pls_lsa:PLSLSA"
    name: Literal["pls_lsa"] = "pls_lsa"
    warmup: Fraction = Field(0.0, description="part of the training on the given labels; at least one epoch")
    detector: Literal["alternate", "loss", "linear"] = Field("alternate", description="what finds wrong labels: a mixture over the losses, a linear separation of those it finds from the others, or both in turn")
    wrong_above: BelowOne = Field(0.95, description="a label is wrong when its loss belongs to the component of large losses with more than this probability")
    layer: str = Field("", description="layer of the backbone that the linear separation sees; empty = its second stage, or its features if it has no stages")
    sharpening: PositiveFloat = Field(0.5, description="temperature of pseudo-labels; 1 leaves them as they are")
    mixup: NonNegativeFloat = Field(1.0, description="Beta(a,a) of the mixing; 0 = no mixing")
    penalty: NonNegativeFloat = Field(0.0, description="weight of the penalty on a mean prediction that is not uniform (1 for WebVision)")
    contrastive: NonNegativeFloat = Field(1.0, description="weight of the contrast with samples of the same label or pseudo-label")
    temperature: PositiveFloat = Field(0.2, description="of the contrast")
    projection: PositiveInt = Field(128, description="width of the contrast")


class LatentOptions(Settings):
    """Latent true labels: a linear classifier on frozen features, fitted without steps, and the posterior of every label."""

    code: ClassVar[str] = "latent:Latent"
    name: Literal["latent"] = "latent"
    components: PositiveInt = Field(256, description="principal components of the features that are used")
    relabel_above: Fraction = Field(0.8, description="a sample takes another label when that label is likelier than this")


class EvenhandOptions(SelectionOptions):
    """Evenhand: a label counts when neighbours or its class's prototype confirm it; every class is drawn alike."""

    code: ClassVar[str] = "evenhand:Evenhand"
    name: Literal["evenhand"] = "evenhand"
    mixup: NonNegativeFloat = Field(1.0, description="Beta(a,a) of the mixing of selected samples; 0 = no mixing")
    relabel_above: Fraction = Field(0.9, description="a sample takes its likeliest class when the classifier gives it more than this; 1 = never")
    neighbours: PositiveInt | None = Field(None, description="samples that vote on a label; none = the root of their number, at most 200")
    bank: PositiveInt = Field(65536, description="samples that may vote: all, or of more samples so many, equally many of every class")


class FinetuneOptions(Settings):
    """Fine-tuning on the labels and weights that an earlier run arrived at (model.start)."""

    code: ClassVar[str] = "finetune:Finetune"
    name: Literal["finetune"] = "finetune"
    balance: Fraction = Field(0.5, description="power of (mean class size / class size) in the weight of a sample; 0 = classes are not weighted")


MethodOptions = Annotated[CrossEntropyOptions | PrototypicalOptions | LDAMOptions | LDAMDRWOptions | CRTOptions | NCMOptions | CoTeachingOptions | MentorNetOptions | ELROptions | ELRPlusOptions | HAROptions | AUMOptions | DivideMixOptions | RoLTOptions | SFAOptions | DaSCOptions | RRLOptions | MoProOptions | SSROptions | PLSLSAOptions | LatentOptions | EvenhandOptions | FinetuneOptions, Field(discriminator="name")]


def options_of(name: str) -> type[Settings]:
    every: tuple[type[Settings], ...] = get_args(get_args(MethodOptions)[0])
    return next(options for options in every if options.model_fields["name"].default == name)
