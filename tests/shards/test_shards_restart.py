"""Killed at any moment, started again, on any number of ranks: the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shards_help import Build, contents, fill, start, words

from shards import builder
from shards import write as writing
from shards.base.errors import UserError
from shards.base.storage import LocalStore, store_at
from shards.config import BuildConfig
from shards.reader import open_split
from shards.sources import collect


@pytest.fixture
def options(tmp_path: Path) -> dict[str, object]:
    root = fill(tmp_path / "in", {"ant": 60, "bee": 40})
    (root / "ant" / "007.jpg").write_bytes(b"bad")  # so that there is a second round
    return {
        "source": "folder",
        "path": str(root),
        "shard_samples": 10,
        "noise": 0.2,
        "rho": 1.5,
        "max_rejected": 0.1,
    }


class Killed(BaseException):
    pass


def test_killed_at_every_step_and_started_again(options, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start may change three files, then it is stopped; at the end the bytes are the same."""
    wanted = contents(build("undisturbed", **options))
    publish = LocalStore.publish
    written: list[str] = []
    budget = 0

    def counted(self, local, name):
        nonlocal budget
        if budget == 0:
            raise Killed
        budget -= 1
        if name.endswith(".tar"):
            written.append(name)
        publish(self, local, name)

    monkeypatch.setattr(LocalStore, "publish", counted)
    for _ in range(100):
        budget = 3
        try:
            url = build("killed", **options)
            break
        except Killed:
            assert not (Path(build.tmp) / "killed" / "manifest.json").exists()
    assert contents(url) == wanted
    # Finished shards were not written again: 12 shards, and the one or two that a bad picture changed.
    assert len(written) <= 12 + 3


def test_a_changed_input_is_not_mixed_with_the_old(options, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self, plans):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(builder.Build, "_finish", stop)
        with pytest.raises(Killed):
            build("out", **options)
    fill(Path(str(options["path"])), {"cow": 20})
    wanted = contents(build("fresh", **options))
    assert contents(build("out", **options)) == wanted


@pytest.mark.parametrize("name", ["holiday.jpg", "train-000000.tar", "mine.parquet"])
def test_a_folder_with_other_files_is_refused_and_left_alone(name: str, options, build: Build, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_bytes(b"precious")
    with pytest.raises(UserError, match=rf"out holds other files \({name}\)\. Choose an empty or new folder"):
        build("out", **options)
    assert contents(tmp_path / "out") == {name: b"precious"}


@pytest.mark.dist
def test_ranks_write_their_share_and_one_manifest(options, tmp_path: Path, build: Build) -> None:
    wanted = contents(build("alone", **options))
    ranks = [
        start(["-m", "shards.build"], words(options, tmp_path / "shared"), RANK=str(rank), WORLD_SIZE="3")
        for rank in (2, 1, 0)
    ]
    for process in ranks:
        assert process.wait(120) == 0, process.stderr.read().decode()
    assert contents(tmp_path / "shared") == wanted


def test_a_rank_that_waits_in_vain_says_so(
    options, build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(builder, "WAIT_SECONDS", 0.3)
    from shards.build import ensure
    from shards.config import BuildConfig

    config = BuildConfig.model_validate({**options, "output": str(tmp_path / "out")})
    with pytest.raises(UserError, match="Waited 0 s for the other ranks to write their shards"):
        ensure(config, print, rank=0, world=2)


def test_a_full_disk_is_a_sentence_and_finished_shards_are_kept(
    options, build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = contents(build("undisturbed", **options))
    add = writing.TarWriter.add
    room = 35

    def full(self, *arguments):
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(28, "No space left on device")
        return add(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(writing.TarWriter, "add", full)
        with pytest.raises(UserError, match=r"No space left on device.*run the same command again"):
            build("out", **options)
    assert len(list((tmp_path / "out").glob("*.tar"))) == 3
    assert not list((tmp_path / "out" / ".build").glob("*.tmp"))
    assert contents(build("out", **options)) == wanted
    assert len(open_split(str(tmp_path / "out"))) > 0


@pytest.mark.parametrize("name", ["build.json", "round-0.json", "train.parquet", "manifest.json"])
def test_a_disk_that_is_full_at_the_end_is_a_sentence_too(
    name: str, options, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = contents(build("undisturbed", **options))
    publish = LocalStore.publish

    def full(self, local, target):
        if target.endswith(name):
            raise OSError(28, "No space left on device")
        publish(self, local, target)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "publish", full)
        with pytest.raises(UserError, match=r"No space left on device.*run the same command again"):
            build("out", **options)
    assert contents(build("out", **options)) == wanted


def small_pngs(root: Path, each: int) -> Path:
    """Of about the same size, so that tars of as many samples have as many blocks."""
    rng = np.random.default_rng(0)
    for name in "ab":
        (root / name).mkdir(parents=True)
        for number in range(each):
            pixels = rng.integers(0, 255, (6, 5 + number % 5, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number:02d}.png")
    return root


def test_killed_between_a_rewritten_tar_and_its_record(
    tmp_path: Path, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old record has the size of the new tar, and other pictures in other places."""
    root = small_pngs(tmp_path / "in", 30)
    options = {"source": "folder", "path": str(root), "shard_samples": 10, "max_rejected": 0.2}
    keys = open_split(build("before", **options)).keys()
    (root / keys[-(len(keys) % 10 or 10)]).write_bytes(b"bad")
    wanted = contents(build("undisturbed", **options))
    write, seen = LocalStore.write, []

    def stop_at_the_second(self, name, data, lasting=True):
        seen.append(name)
        if name.endswith(".part") and seen.count(name) == 2:
            raise Killed
        write(self, name, data, lasting)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "write", stop_at_the_second)
        with pytest.raises(Killed):
            build("killed", **options)
    assert contents(build("killed", **options)) == wanted


def test_a_rank_that_comes_late_to_a_finished_build_changes_nothing(options, tmp_path: Path, build: Build) -> None:
    """Its records are gone with the end of the build; it must not take that for work to do."""
    wanted = contents(build("alone", **options))
    config = BuildConfig(**options, output=build("done", **options))
    late = builder.Build(store_at(config.output), config, collect(config, print), print, rank=1, world=2)
    late.run()
    assert contents(tmp_path / "done") == wanted
    assert not (tmp_path / "done" / ".build").exists() or not list((tmp_path / "done" / ".build").iterdir())


def test_a_repaired_input_is_looked_at_again(tmp_path: Path, build: Build) -> None:
    root = fill(tmp_path / "in", {"ant": 20, "bee": 20})
    good = (root / "ant" / "000.jpg").read_bytes()
    options = {"source": "folder", "path": str(root), "shard_samples": 8}
    for name in ("001", "002", "003"):
        (root / "ant" / f"{name}.jpg").write_bytes(good[:200])
    with pytest.raises(UserError, match="3 of 40 pictures cannot be used"):
        build("out", **options)
    for name in ("001", "002", "003"):
        (root / "ant" / f"{name}.jpg").write_bytes(good)
    assert open_split(build("out", **options)).manifest.rejected.count == 0
