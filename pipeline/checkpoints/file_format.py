"""The file format of a checkpoint: one folder, three files, every byte verified.

    tensors.safetensors   all tensors, by their path in the tree (any safetensors reader opens it)
    state.json            the tree itself; a tensor stands in it as {"$tensor": "path"}
    manifest.json         format, step, size and sha256 of the other two, and a seal: its own sha256

The manifest is written last. A folder whose bytes do not agree with it is refused with the reason. Nothing
here can run code, and no name in a manifest is ever used as a path.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shards.base.errors import UserError
from shards.base.storage import CreateFile, Store

FORMAT = 1
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
MAX_MANIFEST_BYTES = 1 << 20
CHUNK = 8 << 20  # object stores resume a lost connection only between requests
NAME = re.compile(r"step-(\d{9,})(?:\.(\d{1,6}))?")

Tree = dict[str, Any]
Pieces = Iterable[bytes | memoryview]
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Damaged(Exception):
    """The checkpoint is not as it was written; the message says why."""


@dataclass
class Snapshot:
    """A verified checkpoint, still as bytes."""

    name: str
    step: int
    best: bool
    state: bytes
    tensors: bytearray

    @functools.cached_property
    def by_name(self) -> dict[str, Tensor]:
        """Every tensor, as a view of the bytes: a copy would need their memory again."""
        return parse_tensors(self.tensors)

    @functools.cached_property
    def tree(self) -> Tree:
        """The tree that was saved, tensors on the CPU. As long as one of them is held, so are the bytes of all."""
        try:
            return decode(self.state, self.by_name)
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
            raise Damaged(f"its content cannot be read ({type(error).__name__}: {error})") from None


# -- the tree --------------------------------------------------------------------------------------


def encode(tree: Mapping[str, object]) -> tuple[dict[str, Tensor], bytes]:
    """(tensors by path, JSON of the rest). Tuples come back as lists; everything else comes back equal."""
    tensors: dict[str, Tensor] = {}

    def visit(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            name = path if path not in tensors else f"{path}#{len(tensors)}"
            tensors[name] = value
            return {"$tensor": name}
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str) or key.startswith("$"):
                    raise TypeError(f"checkpoint: key {key!r} in '{path}' is not a string, or starts with $")
            return {key: visit(inner, f"{path}/{key}" if path else key) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [visit(inner, f"{path}/{i}") for i, inner in enumerate(value)]
        if type(value) is float and not math.isfinite(value):
            return {"$float": repr(value)}  # not valid in JSON
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(f"checkpoint: '{path}' is a {type(value).__name__}, neither tensor nor JSON value")

    shape = visit(tree, "")
    return tensors, json.dumps(shape, allow_nan=False).encode()


def decode(state: bytes, tensors: dict[str, Tensor]) -> Tree:
    def visit(value: dict[str, Any]) -> Any:
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        return float(value["$float"]) if "$float" in value else value

    tree = json.loads(state, object_hook=visit)
    if not isinstance(tree, dict):
        raise ValueError("state.json does not hold a mapping")
    return tree


# -- safetensors, as a stream ----------------------------------------------------------------------


def stream_tensors(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The safetensors file of contiguous CPU tensors, piece by piece.

    The library's own writer holds the whole file in memory once more; pieces are hashed as they are written.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps tensors aligned
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        kind = _DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in order:
        if tensors[name].numel():
            whole = tensors[name].reshape(-1).view(torch.uint8).numpy().data
            for at in range(0, len(whole), CHUNK):
                yield whole[at : at + CHUNK]


def parse_tensors(data: bytearray) -> dict[str, Tensor]:
    begin = 8 + int.from_bytes(data[:8], "little")
    if not 8 <= begin <= len(data):
        raise ValueError("the header of tensors.safetensors is longer than the file")
    out: dict[str, Tensor] = {}
    whole = torch.frombuffer(data, dtype=torch.uint8)
    for name, item in json.loads(data[8:begin]).items():
        if name == "__metadata__":
            continue
        start, end = item["data_offsets"]
        if not 0 <= start <= end <= len(data) - begin:
            raise ValueError(f"'{name}' lies outside tensors.safetensors")
        piece, dtype = whole[begin + start : begin + end], _DTYPES[item["dtype"]]
        aligned = (begin + start) % dtype.itemsize == 0  # ours are
        out[name] = (piece if aligned else piece.clone()).view(dtype).reshape(item["shape"])
    return out


# -- writing ---------------------------------------------------------------------------------------


def write(store: Store, name: str, step: int, best: bool, tensors: dict[str, Tensor], state: bytes) -> None:
    """Write a checkpoint called `name`, complete or not at all."""
    with store.write_folder(name) as create:
        _write_files(create, step, best, tensors, state)


def _write_files(create: CreateFile, step: int, best: bool, tensors: dict[str, Tensor], state: bytes) -> None:
    """Write the three files, the manifest last."""
    files = {TENSORS: _write_file(create(TENSORS), stream_tensors(tensors)), STATE: _write_file(create(STATE), [state])}
    manifest: Tree = {"format": FORMAT, "step": step, "best": best, "files": files}
    manifest["seal"] = _seal(manifest)
    _write_file(create(MANIFEST), [json.dumps(manifest, indent=1).encode()])


def _write_file(open_file: Any, pieces: Pieces) -> dict[str, Any]:
    """Write pieces to an open file, through to the disk if it has one; what the manifest says of it."""
    digest, size = hashlib.sha256(), 0
    with open_file as file:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            file.write(piece)
        file.flush()
        if (number := _fileno(file)) is not None:
            os.fsync(number)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _fileno(file: Any) -> int | None:
    try:
        return int(file.fileno())
    except (AttributeError, OSError):
        return None


def _seal(manifest: Tree) -> str:
    body = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# -- listing ---------------------------------------------------------------------------------------


def key(name: str) -> tuple[int, int]:
    """(step, number) of a checkpoint's name; later checkpoints have larger keys."""
    match = NAME.fullmatch(name)
    assert match, name
    return int(match[1]), int(match[2] or 0)


def listed(store: Store) -> list[str]:
    """Names of everything that looks like a checkpoint, oldest first."""
    return sorted((name for name in store.folders() if NAME.fullmatch(name)), key=key)


def remove(store: Store, name: str) -> None:
    """Remove a checkpoint; interrupted half-way, what is left no longer counts as one."""
    store.discard_folder(name, first=MANIFEST)


# -- reading ---------------------------------------------------------------------------------------


def read_manifest(store: Store, name: str) -> Tree:
    """The manifest of a checkpoint, its seal checked."""
    path = f"{name}/{MANIFEST}" if name else MANIFEST
    size = store.size(path)
    if size is None:
        raise Damaged(f"{MANIFEST} is missing, so it was never finished or has lost files")
    if size > MAX_MANIFEST_BYTES:
        raise Damaged(f"{MANIFEST} has {size} bytes, more than any manifest")
    try:
        manifest: Tree = json.loads(store.read(path, MAX_MANIFEST_BYTES) or b"")
        version, files = manifest["format"], dict(manifest["files"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise Damaged(f"{MANIFEST} is not readable") from None
    if isinstance(version, int) and version > FORMAT:
        raise UserError(
            f"{store}/{name} is from a newer version (its format is {version}, this one knows {FORMAT}). "
            "Install the newer version, or point checkpoint.url at another folder."
        )
    if strange := sorted(set(files) - {TENSORS, STATE}):
        raise Damaged(f"{MANIFEST} names {strange[0]!r}, which has no place in a checkpoint")
    if set(files) != {TENSORS, STATE} or version != FORMAT or manifest.get("seal") != _seal(manifest):
        raise Damaged(f"{MANIFEST} has been changed since it was written")
    if NAME.fullmatch(name) and key(name)[0] != manifest["step"]:
        raise Damaged(f"{MANIFEST} belongs to step {manifest['step']}")
    return manifest


def read(store: Store, name: str) -> Snapshot:
    """The checkpoint with every byte checked; Damaged if any is wrong."""
    manifest = read_manifest(store, name)
    data: dict[str, bytearray] = {}
    for file, entry in manifest["files"].items():
        path = f"{name}/{file}" if name else file
        size = store.size(path)
        if size is None:
            raise Damaged(f"{file} is missing")
        if size != entry["bytes"]:
            raise Damaged(f"{file} has {size} bytes instead of {entry['bytes']}")
        data[file] = _fetch(store, path, size)
        if hashlib.sha256(data[file]).hexdigest() != entry["sha256"]:
            raise Damaged(f"{file} has other bytes than were written (sha256 differs)")
    return Snapshot(name, manifest["step"], manifest["best"], bytes(data[STATE]), data[TENSORS])


def _fetch(store: Store, path: str, size: int) -> bytearray:
    """All bytes of a file, into memory taken once: a buffer that grows may be copied on the way, and then exists twice."""
    out, at = bytearray(size), 0
    while at < size:
        try:
            piece = store.read_range(path, at, min(size, at + CHUNK))
        except OSError as error:
            raise Damaged(f"{path} cannot be read ({error.strerror or error})") from None
        if not piece:
            raise Damaged(f"{path} ends after {at} bytes")
        out[at : at + len(piece)] = piece
        at += len(piece)
    return out
