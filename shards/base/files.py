"""Local files: folders for results, atomic writes, locks between processes."""

from __future__ import annotations

from pathlib import Path

from shards.base.errors import UserError


def output_folder(path: Path) -> Path:
    """The folder for a command's results, made if need be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be a folder for results ({error.strerror}). Choose another.") from None
    return path
