"""A real S3 server, and a network in front of it that fails as told."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import multiprocessing
import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from shards_help import fill

from shards import verify
from shards.base import storage
from shards.base.errors import UserError
from shards.base.storage import store_at
from shards.build import ensure
from shards.cache import Cache
from shards.config import BuildConfig, CacheConfig
from shards.reader import open_split, read_manifest

pytest.importorskip("s3fs")
pytest.importorskip("moto")
URL = "s3://pictures/deep/shards"
ROOT = str(Path(__file__).parents[2])


class Network(socketserver.ThreadingTCPServer):
    """Passes bytes on to a port; cuts or refuses so many answers to requests that name a tar."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.port, self.cut, self.refuse = port, 0, 0
        self.requests: list[bytes] = []
        self.lock = threading.Lock()

    def heard(self, request: bytes) -> str:
        line = request.split(b"\r\n", 1)[0]
        with self.lock:
            self.requests.append(line)
            if not (line.startswith(b"GET") and b".tar" in line):
                return "pass"
            if self.refuse:
                self.refuse -= 1
                return "refuse"
            if self.cut:
                self.cut -= 1
                return "cut"
            return "pass"


class _Connection(socketserver.BaseRequestHandler):
    server: Network

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.port)) as there, contextlib.suppress(OSError):
            self.fate = "pass"
            answers = threading.Thread(target=self._answers, args=(there,), daemon=True)
            answers.start()
            while data := self.request.recv(65536):
                if data[:4] in (b"GET ", b"HEAD", b"PUT ", b"POST", b"DELE"):
                    self.fate = self.server.heard(data)
                if self.fate == "refuse":
                    self.request.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    break
                there.sendall(data)

    def _answers(self, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := there.recv(65536):
                self.request.sendall(data[:2000] if self.fate == "cut" else data)
                if self.fate == "cut":
                    break
        with contextlib.suppress(OSError):
            self.request.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    from moto.server import ThreadedMotoServer

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    yield port
    server.stop()


@pytest.fixture
def network(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    import boto3

    with Network(server) as network:
        threading.Thread(target=network.serve_forever, daemon=True).start()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{network.server_address[1]}",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        bucket = boto3.resource("s3").Bucket("pictures")
        bucket.create()
        storage._filesystem.cache_clear()
        yield network
        storage._filesystem.cache_clear()
        bucket.objects.all().delete()
        bucket.delete()
        network.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("s3") / "in", {"ant": 30, "bee": 20})


def options(folder: Path, output: str) -> dict[str, object]:
    return {"source": "folder", "path": str(folder), "output": output, "shard_samples": 8, "noise": 0.2}


@pytest.fixture(scope="module")
def local(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    config = BuildConfig.model_validate(options(folder, str(tmp_path_factory.mktemp("s3") / "local")))
    return ensure(config, lambda _: None)


@pytest.fixture
def there(folder: Path, network: Network) -> str:
    return ensure(BuildConfig.model_validate(options(folder, URL)), lambda _: None)


@pytest.fixture
def cache(tmp_path: Path) -> CacheConfig:
    return CacheConfig(folder=str(tmp_path / "cache"), reserve_gb=0, deadline=30)


def objects() -> dict[str, bytes]:
    import boto3

    found = boto3.resource("s3").Bucket("pictures").objects.all()
    return {Path(item.key).name: item.get()["Body"].read() for item in found}


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def digest(url: str, cache: CacheConfig) -> str:
    split = open_split(url, "train", cache)
    split.prefetch(range(len(split.shard_sizes)))
    return hashlib.sha256(b"".join(bytes(split.read(index)) for index in range(len(split)))).hexdigest()


def test_from_build_to_reading(there: str, local: str, cache: CacheConfig) -> None:
    assert objects() == contents(local)
    assert read_manifest(there).hash == read_manifest(local).hash
    assert digest(there, cache) == digest(local, cache)
    assert verify.verify(verify.VerifyConfig(url=there, cache=cache), print) == 0
    with pytest.raises(UserError, match="no finished shards at s3://pictures/nowhere"):
        open_split("s3://pictures/nowhere")


@pytest.fixture
def no_retries_of_s3fs(monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs and botocore ask once. They retry by themselves otherwise, and would hide that we do not."""
    import s3fs

    @functools.lru_cache
    def filesystem(scheme: str, process: int) -> s3fs.S3FileSystem:
        once = {"retries": {"total_max_attempts": 1}}
        found = s3fs.S3FileSystem(skip_instance_cache=True, config_kwargs=once)
        found.retries = 1
        return found

    monkeypatch.setattr(storage, "_filesystem", filesystem)


@pytest.mark.usefixtures("no_retries_of_s3fs")
@pytest.mark.parametrize("fault", ["cut", "refuse"])
def test_answers_that_are_cut_or_refused_are_asked_for_again(
    fault: str, network: Network, there: str, local: str, cache: CacheConfig
) -> None:
    setattr(network, fault, 2)
    assert digest(there, cache) == digest(local, cache)
    assert getattr(network, fault) == 0
    assert not list(Path(cache.folder).glob("*.tmp"))


def test_a_shard_that_is_not_the_one_of_the_manifest_is_never_used(there: str, cache: CacheConfig) -> None:
    import boto3

    name = read_manifest(there).splits["train"].shards[1].name
    item = boto3.resource("s3").Object("pictures", f"deep/shards/{name}")
    data = bytearray(item.get()["Body"].read())
    data[3000] ^= 1
    item.put(Body=bytes(data))
    split = open_split(there, "train", cache.model_copy(update={"deadline": 1}))
    assert len(split.read(0)) > 0
    with pytest.raises(
        UserError, match=rf"Shard s3://.*/{name} could not be had.*its sha256 is not that of the manifest"
    ):
        split.read(8)


def _fetch_all(url: str, folder: str) -> None:
    for shard in read_manifest(url).splits["train"].shards:
        Cache(store_at(url), CacheConfig(folder=folder, reserve_gb=0)).local(shard)


def test_ranks_write_together_and_fetch_one_copy(
    network: Network, folder: Path, local: str, cache: CacheConfig
) -> None:
    words = [f"{key}={value}" for key, value in options(folder, URL).items()]
    command = [sys.executable, "-m", "shards.build", *words]
    ranks = [
        subprocess.Popen(command, env=os.environ | {"PYTHONPATH": ROOT, "RANK": str(rank), "WORLD_SIZE": "2"})
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert objects() == contents(local)
    network.requests.clear()
    context = multiprocessing.get_context("spawn")
    readers = [context.Process(target=_fetch_all, args=(URL, cache.folder)) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
        assert reader.exitcode == 0
    asked = [line for line in network.requests if line.startswith(b"GET") and b"train-" in line]
    assert len(asked) == len(set(asked)) == len(read_manifest(URL).splits["train"].shards)
