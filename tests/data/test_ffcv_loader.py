"""The FFCV file gives the batches of the tars: same rows, same labels, same pixels."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.config import DataConfig
from pipeline.data import sampling
from pipeline.data.batch import Batch, Pass
from pipeline.data.loader import Loader, open_loader
from pipeline.data.partition import survey_batches
from pipeline.distributed.device import use_device
from pipeline.distributed.world import World
from shards import beton
from shards.base.errors import UserError
from shards.config import BuildConfig
from shards.manifest import Manifest
from shards.reader import Split, open_split

pytest.importorskip("ffcv", reason="FFCV is not installed; see the README for the headers it needs")

# Numba's finalisers complain when FFCV's compiled code is collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
VIEWS = ("weak", "strong")


def photograph(number: int) -> Image.Image:
    """Smooth colours in a size of its own."""
    height, width = 40 + number % 7 * 9, 50 + number % 5 * 11
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (3 + number % 4)), np.cos(y / (4 + number % 3)), np.sin((x + y) / 9)]
    return Image.fromarray(np.stack([wave * 90 + 120 for wave in waves], -1).astype(np.uint8))


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Split:
    """JPEG, grey JPEG and PNG in folders, built as tars and as an FFCV file."""
    from shards.build import ensure

    raw = tmp_path_factory.mktemp("raw")
    for number in range(30):
        folder = raw / f"class{number % 3}"
        folder.mkdir(exist_ok=True)
        image = photograph(number)
        if number % 5 == 1:
            image = image.convert("L")
        image.save(folder / f"{number}.{'png' if number % 4 == 0 else 'jpg'}")
    out = str(tmp_path_factory.mktemp("built") / "photographs")
    return open_split(ensure(BuildConfig(source="folder", path=str(raw), output=out, format="both")), "train")


def config(**changes: object) -> DataConfig:
    settings = {
        "batch": 8,
        "size": 24,
        "crop": "resized",
        "flip": True,
        "mix_group": 2,
        "loader": "ffcv",
    } | changes
    return DataConfig.model_validate(settings)


@pytest.fixture(scope="module")
def loaders(photographs: Split) -> tuple[Loader, Loader]:
    """The second of two ranks, from the FFCV file and from the tars; made once: FFCV compiles for long."""
    threads = torch.get_num_threads()
    ffcv, tars = (open_loader(photographs, config(loader=k), 1, World(1, 2), 2) for k in ("ffcv", "tar"))
    assert torch.get_num_threads() == threads, "FFCV would set it for the whole process"
    assert type(tars) is Loader
    assert type(ffcv) is not Loader
    return ffcv, tars


def agree(a: Batch, b: Batch, lossless: set[int]) -> bool:
    """Rows equal; pictures equal to the byte, or for JPEG as near as FFCV's quicker transform comes."""
    rows = all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("index", "label", "valid", "groups"))
    level = 1 / 127.5
    exact = torch.tensor([int(i) in lossless for i in a.index])
    equal = all(torch.equal(a.views[name][exact], b.views[name][exact]) for name in a.views)
    weak = torch.allclose(a.views["weak"], b.views["weak"], atol=4 * level)
    strong = (a.views["strong"] - b.views["strong"]).abs().mean() < 2 * level
    return rows and equal and weak and bool(strong)


def test_batches_and_surveys_are_those_of_the_tars(photographs, loaders):
    ffcv, tars = loaders
    lossless = {i for i in range(len(photographs)) if bytes(photographs.read(i)[:4]) == b"\x89PNG"}
    pass_ = Pass(sampling.shuffled(len(photographs), 1, 2), VIEWS, second=np.arange(5), second_batch=8)
    got, expected = list(ffcv.batches(pass_, 2)), list(tars.batches(pass_, 2))
    assert len(got) == len(expected)
    assert lossless & set(torch.cat([b.index for b in got]).tolist())
    assert all(agree(a, b, lossless) and agree(a.second, b.second, lossless) for a, b in zip(got, expected))
    resumed = list(ffcv.batches(pass_, 2, first_step=2))
    assert all(agree(a, b, lossless) for a, b in zip(resumed, expected[-len(resumed) :], strict=True))
    for (index, images), (same_index, same_images) in zip(ffcv.survey(), tars.survey(), strict=True):
        assert torch.equal(index, same_index)
        assert torch.allclose(images, same_images, atol=4 / 127.5)


def _write_old_beton(url: str, about: Manifest, path: str) -> None:
    beton.FIELDS = ("image", "label", "true_label", "index", "flipped", "key")
    beton._write(url, about, {"train": path})


def test_a_file_of_version_0_1_with_other_field_names_is_read(photographs, loaders, tmp_path, monkeypatch):
    from ffcv.reader import Reader

    path = str(tmp_path / "old.beton")
    assert beton.run_in_child(_write_old_beton, photographs.url, photographs.manifest, path)
    assert "true_label" in Reader(path).handlers
    monkeypatch.setitem(photographs.__dict__, "beton", path)
    old = open_loader(photographs, config(), 1, World(1, 2), 2)
    for (index, images), (same_index, same_images) in zip(old.survey(), loaders[0].survey(), strict=True):
        assert torch.equal(index, same_index)
        assert torch.equal(images, same_images)


def test_an_abandoned_walk_leaves_no_thread(photographs, loaders):
    def running() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name != "tqdm_monitor"}

    before = running()
    batches = loaders[0].batches(Pass(np.arange(len(photographs))), 0)
    next(batches)
    assert running() > before
    batches.close()
    assert running() == before


@pytest.mark.parametrize("kind", ["ffcv", "tar"])
def test_every_thread_chooses_the_device_of_its_rank(kind, photographs, loaders, monkeypatch):
    """Without a GPU: which threads work, and which device each has chosen before. One that has not would use GPU 0."""
    loader, device = loaders[kind == "tar"], torch.device("cuda", 3)
    chosen: dict[int, torch.device] = {}
    worked: dict[str, set[torch.device | None]] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.update({threading.get_ident(): device}))

    def watch(owner: type, name: str) -> None:
        work = getattr(owner, name)

        def watched(*args):
            worked.setdefault(name, set()).add(chosen.get(threading.get_ident()))
            return work(*args)

        monkeypatch.setattr(owner, name, watched)

    from ffcv.loader.epoch_iterator import EpochIterator

    watch(EpochIterator, "__init__")  # makes streams
    watch(EpochIterator, "run_pipeline")
    watch(type(loader), "_crop_views")
    watch(type(loader), "_draw_random")  # takes pinned buffers
    monkeypatch.setattr(loader, "world", World(1, 2, 3, device))
    use_device(device)
    micros = survey_batches(slice(0, len(photographs)), 8)
    filled = list(loader._fill(micros, (("test",), ("test",)), 0, lambda samples: None))
    assert len(filled) == -(-len(photographs) // 8)
    assert worked.keys() >= ({"_crop_views", "_draw_random"} if kind == "tar" else {"__init__", "run_pipeline"})
    assert all(devices == {device} for devices in worked.values()), worked
    assert len(chosen) > 1


def test_the_file_may_vanish_once_it_is_open(photographs, tmp_path, monkeypatch):
    """As when another process makes room in a shared cache: FFCV opens it again for every pass."""
    copy = tmp_path / "copy.beton"
    copy.write_bytes(Path(photographs.beton).read_bytes())
    monkeypatch.setitem(photographs.__dict__, "beton", str(copy))
    loader = open_loader(photographs, config(), 0, World())
    copy.unlink()
    for _ in range(2):
        seen = [index for index, _ in loader.survey()]
        assert torch.cat(seen).tolist() == list(range(len(photographs)))


def test_a_broken_jpeg_is_masked_not_trained_on(photographs, tmp_path, monkeypatch):
    """Bytes changed inside the file, as a failing disk would: FFCV alone would hand out garbage."""
    jpegs = [i for i in range(len(photographs)) if bytes(photographs.read(i)[:2]) == b"\xff\xd8"]
    broken = jpegs[0]
    data = bytes(photographs.read(broken))
    altered = bytearray(Path(photographs.beton).read_bytes())
    place = altered.find(data)
    assert place > 0
    altered[place + 2 : place + len(data)] = bytes(len(data) - 2)
    copy = tmp_path / "altered.beton"
    copy.write_bytes(altered)
    monkeypatch.setitem(photographs.__dict__, "beton", str(copy))
    loader = open_loader(photographs, config(max_bad=0.1), 1, World())
    batches = list(loader.batches(Pass(np.arange(len(photographs))), 0))
    index, valid = torch.cat([b.index for b in batches]), torch.cat([b.valid for b in batches])
    assert valid[index == broken].sum() == 0
    assert list(loader.bad) == [broken]


def test_shards_without_an_ffcv_file_are_refused_with_the_way_out():
    tars = SimpleNamespace(given=np.zeros(3, np.int32), shard_sizes=[3], beton=None)
    with pytest.raises(UserError, match=r"no FFCV file.*shards\.format=both.*data\.loader=tar"):
        open_loader(tars, config(), 0, World())
