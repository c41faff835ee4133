"""Shards elsewhere: the same bytes, fetched once, checked, bounded, in spite of a bad network."""

from __future__ import annotations

import hashlib
import http.server
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from shards_help import fill

from shards import build as building
from shards import inspect, reader, verify
from shards.base import storage
from shards.base.errors import UserError
from shards.base.storage import store_at, with_retries
from shards.build import ensure
from shards.cache import Cache
from shards.config import BuildConfig, CacheConfig
from shards.manifest import ShardInfo
from shards.reader import open_split, read_manifest


def quiet(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("storage") / "in", {"ant": 30, "bee": 20})


def config(folder: Path, output: str) -> BuildConfig:
    tree = {"source": "folder", "path": str(folder), "output": output, "shard_samples": 8, "noise": 0.2}
    return BuildConfig.model_validate(tree)


@pytest.fixture(scope="module")
def local(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return ensure(config(folder, str(tmp_path_factory.mktemp("storage") / "local")), quiet)


@pytest.fixture
def cache(tmp_path: Path) -> CacheConfig:
    return CacheConfig(folder=str(tmp_path / "cache"), reserve_gb=0, deadline=5)


@pytest.fixture
def remote(folder: Path) -> Iterator[str]:
    """Shards in fsspec's memory."""
    url = ensure(config(folder, f"memory://shards-{time.monotonic_ns()}"), quiet)
    yield url
    fsspec.filesystem("memory").rm(url, recursive=True)


def shards_of(url: str) -> list[ShardInfo]:
    return read_manifest(url).splits["train"].shards


def test_a_remote_build_has_the_same_bytes_and_leaves_no_temporary_files(remote: str, local: str) -> None:
    fs = fsspec.filesystem("memory")
    found = {Path(name).name: fs.cat_file(name) for name in fs.find(remote)}
    assert found == {path.name: path.read_bytes() for path in Path(local).iterdir()}


def test_remote_samples_equal_local_ones(remote: str, local: str, cache: CacheConfig) -> None:
    there, here = open_split(remote, cache=cache), open_split(local)
    assert np.array_equal(there.given, here.given)
    there.prefetch(range(len(there.shard_sizes)))
    for index in range(len(here)):
        assert there.read(index) == here.read(index)
    assert there.keys() == here.keys()


def test_a_file_that_goes_between_the_look_and_the_reading_is_none(remote: str, monkeypatch) -> None:
    """Rank 0 ends and tidies up while another rank looks for its news."""
    monkeypatch.setattr(storage.RemoteStore, "size", lambda *_: 10)
    assert store_at(remote).read("gone.json", 100) is None


def test_nothing_is_built_twice_at_a_url(remote: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "collect", lambda *_: pytest.fail("looked at the source again"))
    assert ensure(config(folder, remote), quiet) == remote


def test_remote_shards_are_verified_too(remote: str, cache: CacheConfig) -> None:
    reported: list[str] = []
    options = verify.VerifyConfig(url=remote, decode=True, cache=cache)
    assert verify.verify(options, reported.append) == 0
    fs = fsspec.filesystem("memory")
    name = f"{remote}/train-000001.tar"
    data = bytearray(fs.cat_file(name))
    data[5000] ^= 1
    fs.pipe_file(name, bytes(data))
    assert verify.verify(options, reported.append) >= 1
    assert reported[0] == "train-000001.tar: sha256 is not that of the manifest"
    reported.clear()
    fs.pipe_file(name, bytes(data[:-3000]))  # what is gone is named too
    assert verify.verify(options, reported.append) >= 3
    assert reported[0] == f"train-000001.tar: has {len(data) - 3000} bytes instead of {len(data)}"
    assert any(text.startswith("train-000001.tar: sample 15 ") for text in reported)
    assert not list(Path(cache.folder).iterdir())  # copies go as soon as they were looked at


class Flaky:
    """A file system whose downloads fail as told, once each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *faults: object) -> None:
        self.faults = list(faults)
        self.calls = 0
        real = storage.RemoteStore.fetch

        def fetch(store: storage.RemoteStore, name: str, target: Path) -> None:
            self.calls += 1
            fault = self.faults.pop(0) if self.faults else None
            if isinstance(fault, BaseException):
                raise fault
            real(store, name, target)
            if fault == "cut":
                os.truncate(target, 100)
            if fault == "flip":
                data = bytearray(target.read_bytes())
                data[len(data) // 2] ^= 1
                target.write_bytes(data)

        monkeypatch.setattr(storage.RemoteStore, "fetch", fetch)
        monkeypatch.setattr(storage, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))


@pytest.mark.parametrize("fault", ["cut", "flip", OSError("connection reset"), TimeoutError()])
def test_a_bad_download_is_noticed_and_done_again(fault, remote: str, cache: CacheConfig, monkeypatch) -> None:
    flaky = Flaky(monkeypatch, fault, fault)
    shard = shards_of(remote)[0]
    path = Cache(store_at(remote), cache).local(shard)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == shard.sha256
    assert flaky.calls == 3
    assert not list(Path(cache.folder).glob("*.tmp"))


def test_what_cannot_get_better_fails_at_once(remote: str, cache: CacheConfig, monkeypatch) -> None:
    shard = shards_of(remote)[0]
    flaky = Flaky(monkeypatch, FileNotFoundError())
    with pytest.raises(UserError, match=r"train-000000\.tar is missing"):
        Cache(store_at(remote), cache).local(shard)
    flaky.faults = [PermissionError("Access Denied")]
    with pytest.raises(UserError, match=r"train-000000\.tar may not be read.*Access Denied.*credentials"):
        Cache(store_at(remote), cache).local(shard)
    assert flaky.calls == 2


@pytest.mark.parametrize("fault", [OSError("connection reset"), TimeoutError()])
def test_a_network_that_stays_bad_ends_at_the_deadline_with_the_shard_named(
    fault: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, tries = [100.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(storage, "time", clock)

    def never() -> None:
        tries.append(now[0])
        raise fault

    with pytest.raises(
        UserError, match=r"Shard x could not be reached or read within 60 s: (connection reset|TimeoutError)\."
    ):
        with_retries(never, "Shard x", 60)
    assert 160 - 15 * 1.5 <= now[0] <= 160
    pauses = np.diff(tries)
    assert pauses[0] < 0.5
    assert pauses.max() > 4  # they grow


def test_a_poisoned_copy_is_fetched_again(remote: str, cache: CacheConfig) -> None:
    shard = shards_of(remote)[0]
    path = Cache(store_at(remote), cache).local(shard)
    for poison in (b"\0" * shard.bytes, b"half"):
        path.write_bytes(poison)
        assert Cache(store_at(remote), cache).local(shard) == path
        assert hashlib.sha256(path.read_bytes()).hexdigest() == shard.sha256


def test_the_cache_keeps_its_budget(remote: str, local: str, tmp_path: Path) -> None:
    shards = shards_of(remote)
    budget = sum(sorted(shard.bytes for shard in shards)[-2:]) + 1000
    small = CacheConfig(folder=str(tmp_path / "cache"), max_gb=budget / 1e9, reserve_gb=0, prefetch=1)
    there, here = open_split(remote, cache=small), open_split(local)
    there.prefetch(range(len(shards)))
    for index in range(len(here)):  # plan order
        assert there.read(index) == here.read(index)
        with there.files.cache._lock(Path(small.folder) / "room"):
            kept = sum(path.stat().st_size for path in Path(small.folder).glob("*.tar"))
        assert kept <= budget
    for index in np.random.default_rng(0).permutation(len(here))[:30]:
        assert there.read(index) == here.read(index)
    assert len(there.files.maps) <= 3
    tiny = CacheConfig(folder=str(tmp_path / "tiny"), max_gb=1e-6, reserve_gb=0)
    with pytest.raises(UserError, match=r"does not fit a cache of 1e-06 GB\. Raise max_gb"):
        Cache(store_at(remote), tiny).local(shards[0])


def test_shards_are_fetched_ahead_in_plan_order(remote: str, cache: CacheConfig, monkeypatch) -> None:
    order: list[str] = []
    real = storage.RemoteStore.fetch

    def fetch(store, name, target):
        order.append(name)
        real(store, name, target)

    monkeypatch.setattr(storage.RemoteStore, "fetch", fetch)
    split = open_split(remote, cache=cache)
    order.clear()
    split.prefetch([3, 1, 4, 0])
    _until(lambda: len(order) == 2)
    time.sleep(0.1)
    assert order == ["train-000003.tar", "train-000001.tar"]  # two ahead, no more
    split.read(3 * 8)
    _until(lambda: len(order) == 3)
    split.read(1 * 8)
    _until(lambda: len(order) == 4)
    assert order[2:] == ["train-000004.tar", "train-000000.tar"]


def _until(condition, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_threads_and_forked_processes_read_the_same(remote: str, local: str, cache: CacheConfig) -> None:
    there, here = open_split(remote, cache=cache), open_split(local)
    wanted = hashlib.sha256(b"".join(bytes(here.read(i)) for i in range(len(here)))).hexdigest()
    found: list[str] = []

    def read() -> str:
        return hashlib.sha256(b"".join(bytes(there.read(i)) for i in range(len(there)))).hexdigest()

    threads = [threading.Thread(target=lambda: found.append(read())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted] * 4
    again = open_split(remote, cache=cache)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=lambda: answers.put(_digest(again)))
    child.start()
    assert answers.get(timeout=30) == wanted
    child.join()


def _digest(split) -> str:
    return hashlib.sha256(b"".join(bytes(split.read(i)) for i in range(len(split)))).hexdigest()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("pipe:cat /etc/passwd", "neither a folder nor a URL"),
        ("s3:/bucket/x", "neither a folder nor a URL"),
        ("sftp://host/x", "not read from sftp:// URLs"),
        ("s3://key:secret@bucket/x", r"s3://\*\*\*@bucket/x carries a password"),
    ],
)
def test_urls_that_are_refused(url: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        store_at(url)
    assert "secret" not in str(caught.value)


def test_nothing_is_built_at_a_web_address(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.RemoteStore, "size", lambda *_: None)
    with pytest.raises(UserError, match=r"Nothing can be written to https://host/x\. Choose a folder"):
        ensure(config(folder, "https://host/x"), quiet)


@pytest.mark.parametrize("ranges", [True, False])
def test_shards_on_the_web_are_read_verified_and_looked_at(
    ranges: bool, local: str, cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the simplest of servers, which lists folders as pages of links; with and without ranges."""

    class Server(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=local)

        def do_GET(self) -> None:
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if ranges else None
            if wanted is None:
                super().do_GET()
                return
            start, last = map(int, wanted.groups())
            data = Path(self.translate_path(self.path)).read_bytes()[start : last + 1]
            self.send_response(206)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert _digest(open_split(url, cache=cache)) == _digest(open_split(local))
        reported: list[str] = []
        assert verify.verify(verify.VerifyConfig(url=url, cache=cache), reported.append) == 0, reported
        assert open_split(url, cache=cache).read_one(9) == bytes(open_split(local).read(9))
        with pytest.raises(UserError, match="no finished shards at http://"):
            open_split(f"{url}/nowhere")
        server.shutdown()


def test_a_look_at_remote_shards_fetches_no_shard(remote: str, cache: CacheConfig, tmp_path: Path) -> None:
    assert inspect.main([remote, f"cache.folder={cache.folder}", "sheet=look.png"]) == 0
    assert (tmp_path / "look.png").stat().st_size > 1000
    assert not list(Path(cache.folder).glob("*.tar"))


def test_a_file_url_is_a_folder(local: str) -> None:
    assert len(open_split(f"file://{local}")) == len(open_split(local))


def _fetch_in_process(remote_folder: str, cache_folder: str, log: str) -> None:
    class Recorded(storage.RemoteStore):
        def fetch(self, name: str, target: Path) -> None:
            with open(log, "a") as file:
                file.write(f"{name}\n")
            time.sleep(0.3)
            target.write_bytes((Path(remote_folder) / name).read_bytes())

    store = Recorded("memory://elsewhere", "memory")
    for shard in shards_of(remote_folder):
        Cache(store, CacheConfig(folder=cache_folder, reserve_gb=0)).local(shard)


def test_processes_of_one_machine_share_one_copy(local: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (local, str(tmp_path / "cache"), str(tmp_path / "log"))
    ranks = [context.Process(target=_fetch_in_process, args=arguments) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    fetched = (tmp_path / "log").read_text().split()
    assert sorted(fetched) == sorted(shard.name for shard in shards_of(local))


def _wander(local: str, cache: CacheConfig, seed: int) -> None:
    """Read everything in an order of one's own, through a small cache that others use too."""

    class Near(storage.RemoteStore):
        def fetch(self, name: str, target: Path) -> None:
            target.write_bytes((Path(local) / name).read_bytes())

        def sizes(self, folder: str = "") -> dict[str, int]:
            return storage.LocalStore(local).sizes(folder)

    reader.store_at = lambda url: storage.LocalStore(url) if url == local else Near(url, "memory")
    here, there = open_split(local), reader.Split("memory://near", "train", read_manifest(local), cache, True)
    order = np.random.default_rng(seed).permutation(len(there.shard_sizes))
    there.prefetch(order.tolist())
    for shard in order:
        for index in range(8 * shard, min(8 * shard + 8, len(here))):
            assert there.read(index) == here.read(index)
        with there.files.cache._lock(Path(cache.folder) / "room"):
            kept = sum(path.stat().st_size for path in Path(cache.folder).glob("*.tar"))
        assert kept <= cache.max_gb * 1e9


def test_processes_keep_the_budget_together(local: str, tmp_path: Path) -> None:
    about = read_manifest(local).splits["train"]
    budget = about.table.bytes + 3 * max(shard.bytes for shard in about.shards)
    cache = CacheConfig(folder=str(tmp_path / "cache"), max_gb=budget / 1e9, reserve_gb=0, prefetch=1, deadline=30)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_wander, args=(local, cache, seed)) for seed in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0


@pytest.mark.parametrize("moment", ["_is_complete", "_fetch"])
def test_a_copy_that_another_process_drops_just_now_is_fetched_again(
    moment: str, remote: str, local: str, cache: CacheConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look whether it is there and its sha256; between its sha256 and the opening."""
    keys = open_split(remote, cache=cache).keys()
    original, dropped = getattr(Cache, moment), set()

    def then_dropped(self: Cache, *args):
        found = original(self, *args)
        for copy in Path(cache.folder).glob("*"):
            if copy.suffix in (".parquet", ".tar") and copy not in dropped:
                dropped.add(copy)
                copy.unlink()
        return found

    monkeypatch.setattr(Cache, moment, then_dropped)
    there, here = open_split(remote, cache=cache), open_split(local)
    assert there.keys() == keys
    assert all(there.read(index) == here.read(index) for index in range(len(here)))
    assert dropped


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> storage.Store:
    return storage.store_at(str(tmp_path / "store") if request.param == "local" else f"memory://{tmp_path.name}")


def test_a_folder_is_written_listed_and_discarded(store: storage.Store) -> None:
    store.check_writable()
    assert store.folders() == []
    with store.write_folder("one") as create:
        for name in ("a", "b"):
            with create(name) as file:
                file.write(name.encode())
        assert ("one" in store.folders()) != store.folders_appear_whole
    assert store.folders() == ["one"]
    assert (store.read("one/a", 9), store.read("one/b", 9)) == (b"a", b"b")
    store.discard_folder("one", first="b")
    assert store.folders() == []


def test_a_folder_that_fails_leaves_nothing(store: storage.Store) -> None:
    def fail() -> None:
        with store.write_folder("one") as create:
            with create("a") as file:
                file.write(b"a")
            raise OSError("no room")

    store.check_writable()
    with pytest.raises(OSError, match="no room"):
        fail()
    assert store.folders() == []


def test_a_discarded_folder_loses_its_first_file_first(store: storage.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the process is killed in between: what is left must not look complete."""
    with store.write_folder("one") as create:
        for name in ("a", "b"):
            with create(name) as file:
                file.write(name.encode())

    class Killed(BaseException):
        pass

    def kill(*_: object, **__: object) -> None:
        if store.root is None or not (store.root / "one").exists():
            raise Killed

    monkeypatch.setattr(storage.shutil, "rmtree", kill)
    monkeypatch.setattr(storage.RemoteStore, "remove_folder", kill)
    with pytest.raises(Killed):
        store.discard_folder("one", first="b")
    monkeypatch.undo()
    assert store.read("one/b", 9) is None
    store.check_writable()
    assert not [name for name in store.folders() if name.startswith(".tmp")]
