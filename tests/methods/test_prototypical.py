"""The Prototypical Classifier as a method: its loss, its switches, its beliefs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from pipeline import config as configuration
from pipeline.data.batch import Batch, TrainingSet
from pipeline.distributed.world import World
from pipeline.methods.parts import mixup
from pipeline.methods.parts.survey import Survey
from pipeline.methods.prototype_method import MIXUP_LAMBDA, MIXUP_PARTNERS
from pipeline.methods.prototypical import MAIN, WARMUP, Prototypical, apply_preset

K, N, B = 5, 40, 12


def method(*words: str) -> Prototypical:
    config = configuration.load(
        [
            "model.width=8",
            "model.norm=group",
            "model.embedding=6",
            "method.name=prototypical",
            "method.cleaning_start=0.2",
            "train.epochs=10",
            *words,
        ]
    )
    given = np.random.default_rng(0).integers(0, K, N).astype(np.int32)
    torch.manual_seed(0)
    made = Prototypical(config, TrainingSet(given, K, 0, B), World())
    made.prototypes.copy_(torch.nn.functional.normalize(torch.randn(K, 6), dim=1))
    return made


def batch(made: Prototypical) -> Batch:
    torch.manual_seed(1)
    index = torch.randperm(N)[:B]
    label = torch.from_numpy(made.data.given).long()[index]
    views = {name: torch.randn(B, 3, 8, 8) for name in ("weak", "strong")}
    return Batch(index, label, torch.ones(B), views, (B,), (0, 1, 2), torch.arange(B) // 4)


def survey(made: Prototypical, noise: float = 0.0) -> Survey:
    """Embeddings around the prototypes of the given labels; `noise` of them around another one."""
    torch.manual_seed(2)
    label = torch.from_numpy(made.data.given).long()
    wrong = torch.rand(N) < noise
    centre = made.prototypes[torch.where(wrong, (label + 1) % K, label)]
    z = torch.nn.functional.normalize(centre + 0.1 * torch.randn(N, 6), dim=1)
    return Survey(torch.arange(N), {"z": z, "linear": torch.rand(N)}, N, World())


def slow_loss(made: Prototypical, held: Batch) -> dict[str, float]:
    """Section by section as the paper writes it, in float64, one sample at a time."""
    net, T = made.network, made.options.temperature
    cleaned = made.cleaning_now
    label = made.refined[held.index].long() if cleaned else held.label
    weight = (made.weight[held.index] if cleaned else torch.ones(B)).double()
    logits = net(held.views["weak"])[1].double()
    ce = sum(-w * row.log_softmax(0)[y] for w, row, y in zip(weight, logits, label)) / weight.sum()
    z = net.embed(net(held.views["weak"])[0]).double()
    s = net.embed(net(held.views["strong"])[0]).double()
    cc = torch.zeros((), dtype=torch.float64)
    for i in range(B):
        others = [b for b in range(B) if b != i]
        keys = torch.stack([s[i], *(z[b] for b in others), *(s[b] for b in others)])
        cc -= (keys @ z[i] / T).log_softmax(0)[0] / B
    lam = mixup.mixup_lambda(held, made.options.mixup, MIXUP_LAMBDA)
    partner = mixup.mixup_partners(held, 2, MIXUP_PARTNERS)
    images = torch.cat([held.views["weak"], held.views["strong"]])
    target = one_hot(label, K).double().repeat(2, 1)
    both = weight.repeat(2)
    mixed = lam * images + (1 - lam) * images[partner]
    q = net.embed(net(mixed)[0]).double() @ made.prototypes.double().T / T
    pc, total = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for i in range(2 * B):
        w = lam * both[i] + (1 - lam) * both[partner[i]]
        t = lam * target[i] + (1 - lam) * target[partner[i]]
        pc -= w * (t * q[i].log_softmax(0)).sum()
        total += w
    pc = pc / total
    loss = ce + made.options.contrastive * cc + made.prototype_weight * pc
    return {"ce": float(ce), "cc": float(cc), "pc": float(pc), "loss": float(loss)}


@pytest.mark.parametrize("epoch", [0, 3])
def test_the_loss_is_the_papers(epoch) -> None:
    made = method()
    made.set_epoch(MAIN, epoch)
    made.begin_epoch(survey(made, noise=0.4))
    assert made.cleaning_now == (epoch == 3)
    held = batch(made)
    with torch.no_grad():
        found, expected = made(held), slow_loss(made, held)
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(value, rel=2e-5), name


def test_the_weight_of_the_prototype_loss_ramps_from_one() -> None:
    made = method("method.prototype=5", "method.prototype_ramp=0.2", "train.epochs=200")
    ramp = []
    for epoch in (0, 20, 40, 90):
        made.set_epoch(MAIN, epoch)
        ramp.append(made.prototype_weight)
    assert ramp == [1, 3, 5, 5]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("method.contrastive=0",),
        ("method.cross_entropy=0",),
        ("method.mixup=0",),
        ("method.mixup_views=weak",),
        ("method.cleaning=false",),
        ("method.relabel_weight=one",),
        ("method.preset=paper",),
        ("method.weighted_ce=false",),
        ("method.min_score=0.02",),
        ("model.ema=0.9",),
    ],
    ids=str,
)
@pytest.mark.parametrize("stage", [WARMUP, MAIN])
def test_exactly_the_parts_a_stage_names_learn(words, stage) -> None:
    """Engines that reduce gradients wait for every parameter that may learn, in every ablation."""
    made = method(*words)
    made.set_epoch(stage, 3)
    made.begin_epoch(survey(made, noise=0.4) if made.surveys_before_epoch() else None)
    made(batch(made))["loss"].backward()
    prefixes = made.stages()[stage].trainable
    for name, parameter in made.named_parameters():
        if not name.startswith("average."):
            assert (parameter.grad is not None) == name.startswith(prefixes), name
            assert parameter.grad is None or torch.isfinite(parameter.grad).all()


def test_presets_name_the_switches_and_a_switch_wins() -> None:
    paper, released = (
        apply_preset(method("method.preset=paper").options),
        apply_preset(method("method.preset=released").options),
    )
    assert (paper.relabel_weight, paper.neighbour_rule, paper.prototype_labels) == ("margin", False, "refined")
    assert (released.relabel_weight, released.neighbour_rule, released.prototype_labels) == ("half", True, "given")
    assert method("method.preset=paper", "method.neighbour_rule=on").options.neighbour_rule is True


def test_wrong_labels_are_found_relabelled_and_weigh_little() -> None:
    made = method("method.threshold=fixed", "method.threshold_start=0.25")
    made.set_epoch(MAIN, 2)
    seen = survey(made, noise=0.4)
    wrong = (torch.from_numpy(made.data.given) != (seen["z"] @ made.prototypes.T).argmax(1)).numpy()
    assert 5 < wrong.sum() < 35
    made.weight[torch.from_numpy(wrong)] = 0.01  # the prototypes are good already
    made.begin_epoch(seen)
    beliefs = made.beliefs
    assert (beliefs.clean.numpy() == ~wrong).mean() > 0.9
    assert float(beliefs.weight[wrong].mean()) < 0.3 * float(beliefs.weight[~wrong].mean())
    assert made.flagged.float().sum() == (~beliefs.clean).sum()


def test_nothing_is_cleaned_before_its_time_or_in_the_clean_data_variant() -> None:
    for words, epoch in (((), 1), (("method.cleaning=false",), 9)):
        made = method(*words)
        made.set_epoch(MAIN, epoch)
        made.begin_epoch(survey(made, noise=0.4))
        assert (made.weight == 1).all()
        assert made.refined.tolist() == made.data.given.tolist()


def test_beliefs_take_at_most_eight_bytes_a_sample() -> None:
    made = method()
    held = sum(b.element_size() * b.numel() for b in made.buffers() if len(b.shape) == 1 and len(b) == N)
    assert held <= 8 * N


def test_stale_or_fresh_prototypes_judge() -> None:
    images = torch.randn(3, 3, 8, 8)
    for words, judging in (((), "current"), (("method.stale_prototypes=true",), "prototypes")):
        made = method(*words).eval()
        made.current.copy_(torch.nn.functional.normalize(torch.randn(K, 6), dim=1))
        scores = made.scores(images)
        assert next(iter(scores)) == "prototype"
        assert torch.allclose(scores["prototype"], made.embeddings(images) @ getattr(made, judging).T / 0.3, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_cosines_and_softmaxes_in_float32(dtype) -> None:
    made = method()
    made.set_epoch(MAIN, 0)
    held = batch(made)
    full = made(held)
    with torch.autocast("cpu", dtype=dtype):
        half = made(held)
    for name in ("ce", "cc", "pc"):
        assert half[name].dtype == torch.float32
        assert float(half[name]) == pytest.approx(float(full[name]), rel=0.03)
