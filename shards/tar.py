"""Writing tar archives: the offset of every picture is known, and the same samples give the same bytes."""

from __future__ import annotations

import hashlib
from typing import BinaryIO

BLOCK = 512
CHUNK = 1 << 20
_TAIL = b"\0" * 155 + b"\0" * 12  # name prefix and padding, unused
_TIME = b"0" * 11 + b"\0"
_ZERO = b"0000000" + b"\0"
_OWNER = b"0000644" + b"\0" + _ZERO + _ZERO
_KIND = b"0" + b"\0" * 100 + b"ustar" + b"\0" + b"00" + b"\0" * 64 + _ZERO + _ZERO
# Everything but name, size and checksum is the same in all headers; the checksum counts as eight spaces.
_FIXED = sum(_OWNER) + sum(_TIME) + 8 * 32 + sum(_KIND) + sum(_TAIL)
_REST = _KIND + _TAIL
_PADDING = [b"\0" * (-n % BLOCK) for n in range(BLOCK)]


def header(name: bytes, size: int) -> bytes:
    """A ustar header. Owner, mode and time are fixed, so that they are the same in every build."""
    length = b"%011o\0" % size
    checksum = _FIXED + sum(name + length)
    return b"%b%b%b%b%06o\0 %b" % (name.ljust(100, b"\0"), _OWNER, length, _TIME, checksum, _REST)


class TarWriter:
    """Appends samples to an open file; computes offsets, length and sha256."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.bytes = 0
        self._hash = hashlib.sha256()
        self._buffered: list[bytes] = []
        self._written = 0

    def add(self, name: bytes, extension: bytes, picture: bytes, about: bytes) -> int:
        """Write one sample as two members; returns the offset of the picture's bytes."""
        offset = self.bytes + BLOCK
        size, length = len(picture), len(about)
        self._buffered += (
            header(b"%b.%b" % (name, extension), size),
            picture,
            _PADDING[size % BLOCK],
            header(b"%b.json" % name, length),
            about,
            _PADDING[length % BLOCK],
        )
        self.bytes = offset + size + -size % BLOCK + BLOCK + length + -length % BLOCK
        if self.bytes - self._written >= CHUNK:
            self._write()
        return offset

    def close(self) -> str:
        """End the archive; returns its sha256."""
        self._buffered.append(b"\0" * (2 * BLOCK))
        self.bytes += 2 * BLOCK
        self._write()
        return self._hash.hexdigest()

    def _write(self) -> None:
        """Hash and write the buffer in one piece: many small calls would take longer."""
        data = b"".join(self._buffered)
        self._buffered.clear()
        self._hash.update(data)
        self.file.write(data)
        self._written = self.bytes
