"""CIFAR-N's labels, from a file as its authors publish it: a torch zip with a pickle that is read and never run."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

from shards.base.errors import UserError
from shards.sources.cifar_n import read_cifar_n

TRUE = np.arange(30, dtype=np.int32) % 10
WORSE = np.where(np.arange(30) < 12, 3, TRUE).astype(np.int64)


def write(file: Path, content: object, name: str = "archive/data.pkl", compress: int = zipfile.ZIP_STORED) -> str:
    with zipfile.ZipFile(file, "w", compress) as archive:
        archive.writestr(name, pickle.dumps(content, 2))
        archive.writestr("archive/version", "3\n")
    return str(file)


def good(**more: object) -> dict[str, object]:
    return {"clean_label": TRUE.astype(np.int64), "worse_label": WORSE.astype(np.int64), **more}


def test_the_labels_of_a_column_are_read(tmp_path: Path) -> None:
    assert read_cifar_n(write(tmp_path / "a.pt", good()), "worse_label", TRUE, 10).tolist() == WORSE.tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (good(worse_label=WORSE[:-1]), "does not hold one of 10 classes for each of 30 pictures"),
        (good(worse_label=WORSE + 9), "does not hold one of 10 classes"),
        (good(worse_label=WORSE - 4), "does not hold one of 10 classes"),
        (good(clean_label=TRUE[::-1].astype(np.int64)), "of another set, or in another order"),
        ({"worse_label": WORSE}, "of another set, or in another order"),
        ({"aggre_label": WORSE}, "has no labels 'worse_label'; it has aggre_label"),
        (good(worse_label=WORSE.astype(np.float32)), "an array of something else than bytes or whole numbers"),
        (good(worse_label=WORSE.astype(">i8")), "an array of something else than bytes or whole numbers"),
        ([1, 2], "it is no dictionary"),
    ],
)
def test_labels_that_do_not_fit_are_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        read_cifar_n(write(tmp_path / "a.pt", content), "worse_label", TRUE, 10)


def test_a_file_that_is_a_program_is_refused_and_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    with pytest.raises(UserError, match=r"it wants to run 'posix\.mkdir'"):
        read_cifar_n(write(tmp_path / "a.pt", good(extra=Trap())), "worse_label", TRUE, 10)
    assert not (tmp_path / "trapped").exists()


def test_a_missing_damaged_or_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no label file .*The authors' is at https://github\.com/UCSC-REAL"):
        read_cifar_n(str(tmp_path / "none.pt"), "worse_label", TRUE, 10)
    whole = Path(write(tmp_path / "whole.pt", good())).read_bytes()
    for number, data in enumerate(
        (b"", b"<html>", whole[:200], whole[: len(whole) // 2], whole[:80] + b"x" + whole[81:])
    ):
        (tmp_path / f"{number}.pt").write_bytes(data)
        with pytest.raises(UserError, match="is not a file of CIFAR-N"):
            read_cifar_n(str(tmp_path / f"{number}.pt"), "worse_label", TRUE, 10)
    with pytest.raises(UserError, match="it holds no pickle, or one that is too large"):
        read_cifar_n(write(tmp_path / "b.pt", good(), "archive/other.pkl"), "worse_label", TRUE, 10)
    big = write(tmp_path / "c.pt", "x" * (65 << 20), compress=zipfile.ZIP_DEFLATED)
    with pytest.raises(UserError, match="too large"):
        read_cifar_n(big, "worse_label", TRUE, 10)
