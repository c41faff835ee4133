"""`manifest.json` and the sample table: what a set of shards is made of. Both are checked when read.

`manifest.json` is written last, so a folder that has one is complete. The table (Parquet) has one row for each
sample, in order of its permanent index, and is the byte index of the tars.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import AfterValidator, Field, ValidationError

from shards.base.errors import UserError
from shards.base.settings import Settings

FILE = "manifest.json"
FORMAT, VERSION = "evenhand-shards", 1
MAX_BYTES = 256 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.(tar|parquet|beton|npy|safetensors)")

_TABLE_COLUMNS: dict[str, Any] = {
    "index": pa.int32(),  # permanent, 0..N-1
    "shard": pa.int32(),  # position in the manifest's list of shards
    "offset": pa.int64(),  # of the picture's bytes in that tar
    "size": pa.int32(),
    "format": pa.string(),  # jpg, png or webp
    "given": pa.int32(),  # the label training sees
    "true": pa.int32(),  # -1: unknown
    "flipped": pa.bool_(),  # noise was injected here
    "key": pa.string(),  # name in the source
}
TABLE = pa.schema(_TABLE_COLUMNS)
REJECTED = pa.schema([pa.field(name, pa.string()) for name in ("split", "key", "reason")])


def _plain(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"'{name}' is not a plain file name")
    return name


PlainName = Annotated[str, AfterValidator(_plain)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class FileInfo(Settings):
    name: PlainName
    bytes: int = Field(ge=0)
    sha256: Digest


class ShardInfo(FileInfo):
    samples: int = Field(ge=0)


class SplitInfo(Settings):
    samples: int = Field(ge=0)
    given_counts: list[int]
    clean_counts: list[int]  # by class, before noise was injected
    table: FileInfo
    shards: list[ShardInfo]
    beton: FileInfo | None = None


class BiasInfo(Settings):
    """The bias that was asked for and the one that resulted, in the training split."""

    rho: float
    tail: str
    noise: float
    noise_kind: str
    noise_map: dict[str, str]
    seed: int
    available_counts: list[int]
    realised_rho: float | None  # None: a class is empty
    realised_noise: float  # share of samples whose label the build changed
    flipped: int
    # transition[i][j]: samples of class i labelled j. None above 256 classes: the table has it.
    transition: list[list[int]] | None


class RejectedInfo(Settings):
    count: int
    reasons: dict[str, int]
    table: FileInfo | None


class Manifest(Settings):
    format: Literal["evenhand-shards"] = "evenhand-shards"
    version: Literal[1] = 1
    made_by: str
    source: str
    classes: list[str]
    splits: dict[str, SplitInfo]
    bias: BiasInfo
    groups: dict[str, list[int]]  # many, medium, few: classes by clean training count
    rejected: RejectedInfo
    options: dict[str, Any]
    hash: str = Field(default="", exclude=True)  # sha256 of the file it was read from

    def to_bytes(self) -> bytes:
        """Indented for people, with each list of plain values on one line."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False)
        flat = re.sub(r"\[\n *([^\[\]{}]*?)\n *\]", lambda match: "[" + re.sub(r"\n *", " ", match[1]) + "]", text)
        return (flat + "\n").encode()


def parse(data: bytes, where: str) -> Manifest:
    """The manifest in `data`; UserError if it is damaged."""
    again = "Build the shards again, or get a fresh copy."
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        raise UserError(f"{where}/{FILE} is damaged: it is not JSON. {again}") from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise UserError(f"{where}/{FILE} does not describe shards of this kind. Check the path.")
    if tree.get("version") != VERSION:
        raise UserError(
            f"{where} was made in format version {tree.get('version')}, this program reads {VERSION}. {again}"
        )
    tree["hash"] = hashlib.sha256(data).hexdigest()
    try:
        manifest = Manifest.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{where}/{FILE} is damaged at '{field}': {first['msg']}. {again}") from None
    for name, split in manifest.splits.items():
        if split.shards and sum(shard.samples for shard in split.shards) != split.samples:
            raise UserError(f"{where}/{FILE} is damaged: the shards of '{name}' do not add up to its samples. {again}")
    return manifest
