"""`python -m pipeline.predict RUN PICTURES...`: what a trained model says of picture files, one after the
other.

PICTURES are files or folders (searched for pictures), or `-` for a list of paths on standard input. Answers
appear as they are computed; a picture that cannot be read is reported on standard error and skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING

from shards.base import cli
from shards.base.errors import UserError
from shards.base.files import output_folder
from shards.config import SUFFIXES

if TYPE_CHECKING:
    from pipeline.inference.model import Model, Prediction

MAX_BYTES = 64 << 20


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
    parser = argparse.ArgumentParser(prog="python -m pipeline.predict", description=__doc__.split("\n\n")[1])
    parser.add_argument("run", metavar="RUN", help="output folder, checkpoint, MLflow run id or MLflow model")
    parser.add_argument(
        "pictures", nargs="+", metavar="PICTURES", help="files, folders, or - for paths on standard input"
    )
    parser.add_argument("--jsonl", action="store_true", help="one JSON object per line instead of a table")
    parser.add_argument("--top", type=int, default=1, help="how many classes to name (default 1)")
    parser.add_argument("--best", action="store_true", help="the best checkpoint instead of the newest")
    parser.add_argument("--uri", default="", help="MLflow tracking URI, for run ids and MLflow models")
    parser.add_argument("--out", type=Path, help="file for the answers instead of standard output")
    options = parser.parse_args(argv)
    missing = [name for name in options.pictures if name != "-" and not Path(name).exists()]
    if missing:  # told before torch is loaded, and before the first answer
        raise UserError(
            f"There is no file {missing[0]}. Give picture files, folders, or - for a list on standard input."
        )
    paths = find_pictures(options.pictures, sys.stdin)
    first = next(paths, None)
    if first is None:
        raise UserError("There is no picture (.jpg, .png, .webp) in what was given.")
    from pipeline.inference.open_run import open_run

    model = open_run(options.run, options.uri, options.best).model
    done = skipped = 0
    with _open(options.out) if options.out else nullcontext(sys.stdout) as file:
        for path, answer, problem in answers(model, chain([first], paths)):
            if answer.scores is None:
                print(f"skipped {path}: {problem}", file=sys.stderr)
                skipped += 1
                continue
            print(_line(path, answer, model.classes, options.top, options.jsonl), file=file, flush=True)
            done += 1
    if skipped:
        print(f"{done} answered, {skipped} skipped.", file=sys.stderr)
    return 0 if done else 1


def _open(path: Path) -> IO[str]:
    output_folder(path.parent)
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out: {path} cannot be written ({error.strerror}). Choose another file.") from None


def _line(path: Path, answer: Prediction, classes: list[str], top: int, as_json: bool) -> str:
    assert answer.scores is not None
    order = answer.scores.argsort()[::-1][: max(1, min(top, len(classes)))]
    found = [(classes[k], float(answer.scores[k])) for k in order]
    if as_json:
        named = [{"label": name, "score": score} for name, score in found]
        return json.dumps({"path": str(path), **named[0], "top": named})
    return "\t".join([str(path), *(f"{name}\t{score:.4f}" for name, score in found)])


if __name__ == "__main__":
    cli.run(main)
