"""The steps of a build: plan, write shards, plan again without unusable pictures, write tables and the manifest."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from shards import bias, manifest
from shards.base.errors import UserError
from shards.base.progress import Log, Progress
from shards.base.redact import redact
from shards.base.storage import Store
from shards.config import BuildConfig
from shards.copies import warnings_of_copies
from shards.manifest import FileInfo, Manifest, RejectedInfo, ShardInfo, SplitInfo
from shards.names import tail_in_words
from shards.picture import Rules, check_and_convert
from shards.plan import Plan, describe, make_plan, warnings_of_bias
from shards.record import RECORD, read_record
from shards.sources import Collection, Rejected
from shards.write import JSON_FIELDS, Job, Part, Task, load_part, part_name, shard_name, write_all

MADE_BY = "evenhand 0.1.0"
SINGLE_WRITER_SAMPLES = 5000  # for fewer, starting more processes takes longer than the work
MAX_SHARD_SAMPLES = 10_000  # in one shard
USUAL_SHARDS, MIN_SHARD_SAMPLES = 32, 512  # a small set gets smaller shards, so that every writer has work
WAIT_SECONDS = 1800.0  # a rank gives up when the others have written nothing for so long
_SPLITS = "train|validation|test|imagenet"
_OUR_FILES = re.compile(rf"(({_SPLITS})-\d{{6}}\.tar|({_SPLITS}|rejected)\.parquet|({_SPLITS})\.beton)")


def remove_leftovers(store: Store, about: Manifest) -> None:
    """Remove temporary files of a build that was stopped after it wrote its manifest."""
    if store.sizes(".build"):
        if about.options.get("format") == "beton":
            for info in about.splits.values():
                for shard in info.shards:
                    store.remove(shard.name)
        store.remove_folder(".build")


class Build:
    """One build of one collection, on one rank."""

    def __init__(
        self,
        store: Store,
        config: BuildConfig,
        collection: Collection,
        log: Log = print,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.store, self.config, self.collection, self.log = store, config, collection, log
        self.rank, self.world = rank, world
        self.rules = Rules.of(config)
        self.job = Job(store.url, collection.classes, collection.reader, self.rules)
        self.bad: dict[str, set[int]] = {}
        self.reasons = list(collection.rejected)
        self.sizes: dict[str, int] = {}
        self.checks: dict[str, list[np.ndarray]] = {}  # of the stored bytes, by split

    def run(self) -> Manifest:
        try:
            return self._run()
        except BrokenPipeError:  # the reader of our log is gone
            raise
        except OSError as error:
            raise UserError(
                f"Writing to {self.store} failed: {redact(str(error))}. Make room, check the rights or choose another output, "
                "then run the same command again: finished shards are kept."
            ) from None

    def _run(self) -> Manifest:
        self._check_rejected()
        plans = make_plan(self.collection, self.config, {})
        for warning in warnings_of_bias(self.collection, plans["train"], self.config):
            self.log(warning)
        self._choose_sizes_and_record(plans)
        for number in itertools.count():
            closed = self._read_round(number)  # written by an earlier start that was killed
            if closed is None:
                self._write(plans)
                closed = self._close_round(number, plans)
            self.reasons = [*self.collection.rejected, *(tuple(item) for item in closed["reasons"])]
            try:
                self._check_rejected()
            except UserError:
                self._forget_rejections(plans)
                raise
            bad = {split: set(rows) for split, rows in closed["rows"].items()}
            if bad == self.bad:  # no new unusable pictures: the shards are as planned
                break
            self.bad = bad
            plans = make_plan(self.collection, self.config, bad)
        return self._finish(plans) if self.rank == 0 else self._wait_for_manifest()

    def _choose_sizes_and_record(self, plans: dict[str, Plan]) -> None:
        """Choose the samples per shard, write the record, and remove shards of an unfinished build with other options."""
        for split, plan in plans.items():
            self.sizes[split] = self.config.shard_samples or self._shard_samples(split, plan)
        listed = hashlib.sha256(json.dumps(self.collection.classes).encode())
        for rows in self.collection.splits.values():
            for part in (rows.given, rows.true):
                listed.update(part.data)
            for buffer in rows.keys.buffers():
                listed.update(buffer or b"")
        # With the field names: shards of an unfinished build with other names in their JSON are not kept.
        record = {"options": self.config.content(), "input": listed.hexdigest(), "json_fields": JSON_FIELDS}
        data = (json.dumps(record, indent=1) + "\n").encode()
        if self.rank:
            self._wait(lambda: self.store.read(RECORD, 1 << 20) == data, "rank 0 to begin")
        elif self.store.read(RECORD, 1 << 20) != data:
            self._remove_unfinished()
            self.store.write(RECORD, data)

    def _remove_unfinished(self) -> None:
        """Remove the files of an unfinished build. Other files are never touched: then it is an error."""
        present = self.store.sizes()
        foreign = [name for name in sorted(present) if name != RECORD and not _OUR_FILES.fullmatch(name)]
        if foreign or (present and read_record(self.store) is None):
            first = (foreign or sorted(present))[0]
            raise UserError(f"{self.store} holds other files ({first}). Choose an empty or new folder as output.")
        for name in present:
            self.store.remove(name)
        self.store.remove_folder(".build")

    def _shard_samples(self, split: str, plan: Plan) -> int:
        """The samples that make up shard_mb, estimated from up to 64 pictures; fewer if that gives too few shards."""
        keys = self.collection.splits[split].keys
        total, seen = 0, 0
        for row in plan.rows[:: max(1, len(plan) // 64)][:64].tolist():
            try:
                data, _ = check_and_convert(self.collection.reader.read(split, row, keys[row].as_py()), self.rules)
            except (Rejected, OSError):
                continue
            total, seen = total + len(data) + 2048, seen + 1
        fitting = int(self.config.shard_mb * 1e6 * seen / total) if seen else MAX_SHARD_SAMPLES
        fair = max(MIN_SHARD_SAMPLES, -(-len(plan) // USUAL_SHARDS))
        return min(max(1, fitting), MAX_SHARD_SAMPLES, fair)

    def _tasks(self, plans: dict[str, Plan]) -> Iterator[tuple[str, int, int, int, str]]:
        """(split, number, first index, end, digest) of every shard."""
        salt = json.dumps(self.config.content(), sort_keys=True)
        for split, plan in plans.items():
            size = self.sizes[split]
            for number, start in enumerate(range(0, len(plan), size)):
                stop = min(start + size, len(plan))
                digest = hashlib.sha256(f"{salt}{plan.digest(start, stop)}".encode()).hexdigest()
                yield split, number, start, stop, digest

    def _written_parts(self, plans: dict[str, Plan]) -> Iterator[tuple[str, int, int, int, Part | None]]:
        for split, number, start, stop, digest in self._tasks(plans):
            part = load_part(self.store, shard_name(split, number))
            yield split, number, start, stop, part if part and part.digest == digest else None

    def _write(self, plans: dict[str, Plan]) -> None:
        """Write this rank's share of the shards that are missing."""
        own_tasks = [
            task
            for turn, (task, (*_, part)) in enumerate(zip(self._tasks(plans), self._written_parts(plans)))
            if turn % self.world == self.rank and part is None
        ]
        total = sum(stop - start for _, _, start, stop, _ in own_tasks)
        if not own_tasks or (
            self.rank and self.store.size(manifest.FILE) is not None
        ):  # rank 0 is done and has removed the records
            return
        # With several ranks each rank is one writer. A memory: store exists in this process only.
        writers = self.config.writers or (
            1 if total < SINGLE_WRITER_SAMPLES or self.world > 1 else len(os.sched_getaffinity(0))
        )
        if self.store.url.startswith("memory:"):
            writers = 1

        def tasks() -> Iterator[Task]:
            for split, number, start, stop, digest in own_tasks:
                plan = plans[split]
                rows = plan.rows[start:stop]
                keys: list[Any] = self.collection.splits[split].keys.take(rows).to_pylist()
                labels = (plan.given[start:stop], plan.true[start:stop], plan.flipped[start:stop])
                yield Task(split, number, start, digest, rows, keys, *labels)

        try:
            with Progress(total, "pictures", self.log, bar=self.log is print) as progress:
                write_all(tasks(), self.job, min(writers, len(own_tasks)), progress.step)
        except KeyboardInterrupt:
            self.log("Finished shards are kept. The same command writes the rest.")
            raise
        except BrokenProcessPool:
            raise UserError(
                "A writer process was killed, perhaps because memory ran out. Run the command again (finished "
                "shards are kept), with fewer writers if it happens again."
            ) from None

    def _read_round(self, number: int) -> dict[str, Any] | None:
        data = self.store.read(f".build/round-{number}.json", 1 << 30)
        return json.loads(data) if data else None

    def _close_round(self, number: int, plans: dict[str, Plan]) -> dict[str, Any]:
        """When all shards are written: which rows were unusable so far. Rank 0 writes it, the others read it."""
        if self.rank:
            self._wait(
                lambda: self._read_round(number) is not None or self.store.size(manifest.FILE) is not None,
                "rank 0",
            )
            return self._read_round(number) or {"rows": {k: list(v) for k, v in self.bad.items()}, "reasons": []}
        if self.world > 1:
            self._wait(
                lambda: all(part for *_, part in self._written_parts(plans)), "the other ranks to write their shards"
            )
        rows = {split: sorted(bad) for split, bad in self.bad.items()}
        reasons = self.reasons[len(self.collection.rejected) :]
        for split, _, _, _, part in self._written_parts(plans):
            for row, reason in part.rejected() if part else []:
                rows.setdefault(split, []).append(row)
                reasons.append((split, self.collection.splits[split].keys[row].as_py(), reason))
        closed = {"rows": rows, "reasons": reasons}
        self.store.write(f".build/round-{number}.json", json.dumps(closed).encode())
        return closed

    def _forget_rejections(self, plans: dict[str, Plan]) -> None:
        """Rejected pictures are read again by the next build: they may have been repaired."""
        if self.rank:
            return
        for name in self.store.sizes(".build"):
            if name.startswith("round-"):
                self.store.remove(f".build/{name}")
        for split, number, _, _, part in self._written_parts(plans):
            if part and part.rejected():
                self.store.remove(part_name(shard_name(split, number)))

    def _check_rejected(self) -> None:
        """Stop when too much of the input is unusable."""
        total = sum(len(rows) for rows in self.collection.splits.values()) + len(self.collection.rejected)
        if len(self.reasons) <= self.config.max_rejected * total:
            return
        examples = "".join(f"\n  {split}: {key}: {reason}" for split, key, reason in self.reasons[:5])
        raise UserError(
            f"{len(self.reasons)} of {total} pictures cannot be used, more than max_rejected="
            f"{self.config.max_rejected:g} allows. The first:{examples}\nRepair the input, or raise "
            "max_rejected and run the same command again."
        )

    def _finish(self, plans: dict[str, Plan]) -> Manifest:
        splits = {split: self._table(split, plans) for split in plans}
        for split, info in splits.items():
            expected = {shard.name for shard in info.shards}
            for name in self.store.sizes():
                if name.startswith(f"{split}-") and name.endswith(".tar") and name not in expected:
                    self.store.remove(name)
        reasons = sorted(self.reasons)
        table = None
        if reasons:
            columns = dict(zip(manifest.REJECTED.names, zip(*reasons)))
            table = self._publish_table("rejected.parquet", [pa.table(columns, schema=manifest.REJECTED)])
        kinds = [reason.split(" (")[0] for _, _, reason in reasons]
        train = plans["train"]
        about = Manifest(
            made_by=MADE_BY,
            source=self.collection.name,
            classes=self.collection.classes,
            splits=splits,
            bias=describe(self.collection, train, self.config),
            groups={
                name: np.flatnonzero(members).tolist()
                for name, members in bias.class_groups(train.clean_counts).items()
            },
            rejected=RejectedInfo(
                count=len(reasons),
                reasons={kind: kinds.count(kind) for kind in sorted(set(kinds))},
                table=table,
            ),
            options=self.config.content(inputs=False),
        )
        if self.config.format != "tar":
            from shards.beton import add_betons

            about = add_betons(self.store, about, self.config.format == "beton", self.log)
        self.store.write(manifest.FILE, about.to_bytes())
        for split in splits if self.config.format == "beton" else ():
            for shard in splits[split].shards:
                self.store.remove(shard.name)
        self.store.remove_folder(".build")
        for warning in warnings_of_copies(
            {split: np.concatenate(parts) for split, parts in self.checks.items()},
            {split: plan.given for split, plan in plans.items()},
            lambda split, index: self.collection.splits[split].keys[int(plans[split].rows[index])].as_py(),
        ):
            self.log(warning)
        rejected = f", {len(reasons)} rejected (rejected.parquet says why)" if reasons else ""
        samples = ", ".join(f"{info.samples} {split}" for split, info in splits.items())
        classes = f"{len(self.collection.classes)} classes, {tail_in_words(about.bias)}"
        self.log(f"{self.store}: {samples} samples, {classes}{rejected}.")
        return about

    def _table(self, split: str, plans: dict[str, Plan]) -> SplitInfo:
        """The sample table of a split, one shard at a time."""
        plan = plans[split]
        keys = self.collection.splits[split].keys
        shards: list[ShardInfo] = []

        def tables() -> Iterator[pa.Table]:
            for _, number, start, stop, part in self._written_parts({split: plan}):
                if part is None:
                    raise UserError(f"{shard_name(split, number)} disappeared during the build. Run the command again.")
                written = part.table
                shards.append(
                    ShardInfo(
                        name=shard_name(split, number),
                        bytes=part.bytes,
                        sha256=part.sha256,
                        samples=stop - start,
                    )
                )
                check = written["crc32"].to_numpy() << 32 | written["size"].to_numpy()
                self.checks.setdefault(split, []).append(check)
                columns: dict[str, Any] = {
                    "index": np.arange(start, stop, dtype=np.int32),
                    "shard": np.full(stop - start, number, np.int32),
                    "offset": written["offset"],
                    "size": written["size"],
                    "format": written["format"],
                    "given": plan.given[start:stop],
                    "true": plan.true[start:stop],
                    "flipped": plan.flipped[start:stop],
                    "key": keys.take(plan.rows[start:stop]),
                }
                yield pa.table(columns, schema=manifest.TABLE)

        info = self._publish_table(f"{split}.parquet", tables())
        return SplitInfo(
            samples=len(plan),
            given_counts=bias.counts_of(plan.given, len(self.collection.classes)).tolist(),
            clean_counts=plan.clean_counts.tolist(),
            table=info,
            shards=shards,
        )

    def _publish_table(self, name: str, tables: Iterable[pa.Table]) -> FileInfo:
        temporary = self.store.temporary()
        try:
            writer = None
            for table in tables:
                writer = writer or pa.parquet.ParquetWriter(temporary, table.schema, compression="zstd")
                writer.write_table(table)
            if writer is None:
                raise UserError("A split without a single picture cannot be stored. Check the validation settings.")
            writer.close()
            with open(temporary, "rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            info = FileInfo(name=name, bytes=temporary.stat().st_size, sha256=sha256)
            self.store.publish(temporary, name)
            return info
        finally:
            temporary.unlink(missing_ok=True)

    def _wait_for_manifest(self) -> Manifest:
        self._wait(lambda: self.store.size(manifest.FILE) is not None, "rank 0 to finish")
        return manifest.parse(self.store.read(manifest.FILE, manifest.MAX_BYTES) or b"", repr(self.store))

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until `ready()`. Give up when no file of the build has changed for WAIT_SECONDS."""
        changed_at, last = time.monotonic(), {"": -1}
        while not ready():
            present = self.store.sizes(".build")
            if present != last:
                changed_at, last = time.monotonic(), present
            if time.monotonic() - changed_at > WAIT_SECONDS:
                raise UserError(f"Waited {WAIT_SECONDS:.0f} s for {what}. Look at the logs of the other ranks.")
            time.sleep(0.2)
