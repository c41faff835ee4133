"""`python -m pipeline.predict RUN PICTURES...`: classify picture files by a trained model, one after the
other.

PICTURES are files or folders (searched for pictures), or `-` for a list of paths on standard input. Answers
appear as they are computed; a picture that cannot be read is reported on standard error and skipped.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pydantic import Field, PositiveInt

from shards.base import cli
from shards.base.errors import UserError
from shards.base.files import output_folder
from shards.base.settings import Settings
from shards.config import SUFFIXES

if TYPE_CHECKING:
    from pipeline.inference.model import Model, Prediction

MAX_BYTES = 64 << 20


class PredictConfig(Settings):
    run: str = Field(description="output folder, checkpoint, MLflow run id or MLflow model")
    pictures: list[str] = Field(min_length=1, description="files, folders, or - for paths on standard input")
    jsonl: bool = Field(False, description="one JSON object per line instead of a table")
    top: PositiveInt = Field(1, description="how many classes to name")
    best: bool = Field(False, description="the best checkpoint instead of the newest")
    uri: str = Field("", description="MLflow tracking URI, for run ids and MLflow models")
    out: str = Field("", description="file for the answers; empty = standard output")


COMMAND = cli.Command(
    "python -m pipeline.predict",
    "Classify picture files, one after the other. A picture that cannot be read is reported and skipped.",
    PredictConfig,
    words=("run", "pictures"),
)


def find_pictures(names: Iterable[str], stdin: IO[str]) -> Iterator[Path]:
    """Every picture file meant by the arguments, in order."""
    for name in names:
        if name == "-":
            yield from (Path(line.rstrip("\n")) for line in stdin if line.strip())
            continue
        path = Path(name)
        if path.is_dir():
            yield from (p for p in sorted(path.rglob("*")) if p.suffix.lower() in SUFFIXES and p.is_file())
        else:
            yield path


def _read(path: Path) -> tuple[bytes, str]:
    """(bytes, problem)"""
    try:
        if path.stat().st_size > MAX_BYTES:
            return b"", f"larger than {MAX_BYTES >> 20} MiB"
        return path.read_bytes(), ""
    except OSError as error:
        return b"", error.strerror or str(error)


def answers(model: Model, paths: Iterable[Path]) -> Iterator[tuple[Path, Prediction, str]]:
    """(path, prediction, problem) of every picture, in order and as they come."""
    seen: deque[tuple[Path, str]] = deque()

    def pictures() -> Iterator[bytes]:
        for path in paths:
            data, problem = _read(path)
            seen.append((path, problem))
            yield data

    for answer in model.predict(pictures()):
        path, problem = seen.popleft()
        yield path, answer, problem or answer.problem


def main(argv: list[str]) -> int:
    config = COMMAND.load(argv)
    missing = [name for name in config.pictures if name != "-" and not Path(name).exists()]
    if missing:  # before torch is imported, and before the first answer
        raise UserError(
            f"There is no file {missing[0]}. Give picture files, folders, or - for a list on standard input."
        )
    paths = find_pictures(config.pictures, sys.stdin)
    first = next(paths, None)
    if first is None:
        raise UserError("There is no picture (.jpg, .png, .webp) in what was given.")
    from pipeline.inference.open_run import open_run

    model = open_run(config.run, config.uri, config.best).model
    done = skipped = 0
    with _open(Path(config.out)) if config.out else nullcontext(sys.stdout) as file:
        for path, answer, problem in answers(model, chain([first], paths)):
            if answer.scores is None:
                print(f"skipped {path}: {problem}", file=sys.stderr)
                skipped += 1
                continue
            print(_line(path, answer, model.classes, config.top, config.jsonl), file=file, flush=True)
            done += 1
    if skipped:
        print(f"{done} answered, {skipped} skipped.", file=sys.stderr)
    return 0 if done else 1


def _open(path: Path) -> IO[str]:
    output_folder(path.parent)
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"out={path} cannot be written ({error.strerror}). Choose another file.") from None


def _line(path: Path, answer: Prediction, classes: list[str], top: int, as_json: bool) -> str:
    assert answer.scores is not None
    order = answer.scores.argsort()[::-1][:top]
    best = [(classes[k], float(answer.scores[k])) for k in order]
    if as_json:
        named = [{"label": name, "score": score} for name, score in best]
        return json.dumps({"path": str(path), **named[0], "top": named})
    return "\t".join([str(path), *(f"{name}\t{score:.4f}" for name, score in best)])


def start() -> None:
    cli.run(main)


if __name__ == "__main__":
    start()
