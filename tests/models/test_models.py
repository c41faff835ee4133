"""Networks: sizes as published, behaviour the published numbers depend on."""

import pytest
import torch

from pipeline.config import ModelConfig
from pipeline.distributed.world import World
from pipeline.models.backbones import build_backbone
from pipeline.models.network import Average, Network, power_norm, unit
from pipeline.models.preact_resnet import PreActBlock, PreActResNet18
from shards.base.errors import UserError


def parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_preact_resnet18_has_the_published_size() -> None:
    assert parameters(PreActResNet18(64)) == 11_166_144


def test_inception_resnet_v2_has_the_published_size() -> None:
    backbone, features = build_backbone(ModelConfig(backbone="inception_resnet_v2"))
    assert (parameters(backbone), features) == (54_306_464, 1536)


def test_the_identity_shortcut_takes_the_activated_input() -> None:
    block = PreActBlock(4, 4, 1, "batch").eval()
    torch.nn.init.zeros_(block.conv2.weight)  # only the shortcut is left
    x = torch.randn(2, 4, 5, 5)
    assert torch.allclose(block(x), torch.relu(block.norm1(x)))


def test_features_can_be_negative_because_nothing_follows_the_last_stage() -> None:
    torch.manual_seed(0)
    assert (PreActResNet18(8)(torch.randn(4, 3, 16, 16)) < 0).any()


def test_group_norm_rows_do_not_see_each_other() -> None:
    network = PreActResNet18(8, "group").train()
    x = torch.randn(4, 3, 16, 16)
    assert torch.allclose(network(x)[:2], network(x[:2]), atol=1e-5)


def test_embeddings_are_unit_length_and_zero_stays_zero() -> None:
    network = Network(ModelConfig(width=8), 10, World(), embed=True)
    features, logits = network(torch.randn(4, 3, 16, 16), None)
    assert logits.shape == (4, 10)
    assert torch.allclose(network.embed(features).norm(dim=1), torch.ones(4), atol=1e-6)
    zero = unit(torch.zeros(2, 5, requires_grad=True))
    assert torch.isfinite(zero).all()
    assert (zero == 0).all()


def test_activation_checkpointing_changes_memory_not_mathematics() -> None:
    torch.manual_seed(0)
    plain = Network(ModelConfig(width=8, norm="group"), 10, World())
    torch.manual_seed(0)
    saving = Network(ModelConfig(width=8, norm="group", checkpoint_activations=True), 10, World())
    x = torch.randn(2, 3, 16, 16)
    for network in (plain, saving):
        network(x, None)[1].sum().backward()
    for a, b in zip(plain.parameters(), saving.parameters()):
        assert torch.equal(a.grad, b.grad)


def test_the_average_follows_the_weights_and_never_learns() -> None:
    network = Network(ModelConfig(width=8), 10, World())
    average = Average(network, 0.9)
    before = average.network.head.bias.clone()
    with torch.no_grad():
        network.head.bias.add_(1.0)
    average.update(network)
    assert torch.allclose(average.network.head.bias, before + 0.1)
    assert not any(p.requires_grad for p in average.parameters())


def test_the_average_copies_every_buffer_whatever_its_type() -> None:
    network = Network(ModelConfig(width=8), 10, World()).train()
    average = Average(network, 0.9)
    network(torch.randn(4, 3, 16, 16), None)
    average.update(network)
    kinds = {value.dtype for value in network.buffers()}
    assert kinds == {torch.float32, torch.int64}  # statistics, and how many batches they are of
    for copied, value in zip(average.network.buffers(), network.buffers(), strict=True):
        assert torch.equal(copied, value)
        assert copied.data_ptr() != value.data_ptr()


def test_the_average_copies_many_buffers_at_once() -> None:
    """One call for each type, not one for each of hundreds of buffers."""
    network = Network(ModelConfig(width=8), 10, World())
    average = Average(network, 0.9)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        average.update(network)
    called = [event.name for event in profile.events()]
    assert called.count("aten::_foreach_copy_") == 2
    assert len(list(network.buffers())) > 2


def test_the_average_of_a_compiled_network_is_compiled() -> None:
    """It is the one that surveys and evaluates. Compilation itself waits for the first picture."""
    network = Network(ModelConfig(width=8, compile=True), 10, World())
    assert Average(network, 0.9).network.backbone._compiled_call_impl is not None
    assert Average(Network(ModelConfig(width=8), 10, World()), 0.9).network.backbone._compiled_call_impl is None


def test_a_misspelt_backbone_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="inception_resnet_v2"):
        build_backbone(ModelConfig(backbone="inception_resnetv2"))


def test_pretrained_weights_load_from_safetensors(tmp_path) -> None:
    from safetensors.torch import save_file

    source = PreActResNet18(8)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    loaded, _ = build_backbone(ModelConfig(width=8, pretrained=str(tmp_path / "w.safetensors")))
    assert all(torch.equal(a, b) for a, b in zip(source.state_dict().values(), loaded.state_dict().values()))
    with pytest.raises(UserError, match="other shapes"):
        build_backbone(ModelConfig(width=16, pretrained=str(tmp_path / "w.safetensors")))


def test_powers_of_features_have_length_one_their_signs_and_a_finite_slope_at_zero() -> None:
    features = torch.tensor([[0.0, 1.0, -8.0], [0.0, 0.0, 0.0]], requires_grad=True)
    out = power_norm(features)
    expected = torch.tensor([0.0, 1.0, -(8**0.7)])
    assert torch.allclose(out[0], expected / expected.norm(), atol=1e-4)
    assert torch.equal(out[1], torch.zeros(3))
    out.sum().backward()
    assert torch.isfinite(features.grad).all()
    config = ModelConfig(width=4, feature_norm="power")
    network = Network(config, 3, World()).eval()
    images = torch.rand(2, 3, 16, 16)
    assert torch.allclose(network(images)[0], power_norm(network.backbone(images)))
