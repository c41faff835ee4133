"""The Python batches of CIFAR are pickles. A pickle can call any function it names; here it can name only stand-ins."""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What a batch holds, by key.
Batch = dict[str, Any]


class NotPlainData(Exception):
    """The file holds something else than numbers, texts and arrays of bytes or whole numbers."""


def read_batch(data: bytes) -> Batch:
    """The dictionary in a batch file; arrays become NumPy arrays, byte strings become text."""
    try:
        _check_sizes(data)
        tree = _Unpickler(data).load()
    except NotPlainData:
        raise
    except Exception as error:  # cut or garbled instructions
        raise NotPlainData(f"damaged ({type(error).__name__})") from None
    if not isinstance(tree, dict):
        raise NotPlainData("it is no dictionary")
    return {str(_plain(key)): _plain(value) for key, value in tree.items()}


def _check_sizes(data: bytes) -> None:
    """Refuse a pickle that asks for more memory than its own size explains: the unpickler believes what it says."""
    for count, (code, argument, _) in enumerate(pickletools.genops(data)):  # raises where a length exceeds the data
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
            raise NotPlainData("its memo has gaps")


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")  # strings of Python 2 stay bytes
        self._text_left = len(data)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")):
            return _Array
        if (module, name) == ("numpy", "ndarray"):
            return None  # an argument of _reconstruct
        if (module, name) == ("numpy", "dtype"):
            return _Dtype
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes in an old protocol
            return self._encode
        raise NotPlainData(f"it wants to run '{module}.{name}'")

    def _encode(self, text: str, encoding: str) -> bytes:
        self._text_left -= len(text)
        if self._text_left < 0:  # the same text again and again
            raise NotPlainData("it holds more text than its size")
        return text.encode("latin-1")


class _Dtype:
    """Of bytes, or of 64-bit integers as noisy labels are published."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        text = name.decode("ascii", "replace") if isinstance(name, bytes) else name
        self.kind = {"u1": "u1", "|u1": "u1", "uint8": "u1", "i8": "<i8", "<i8": "<i8", "int64": "<i8"}.get(text)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        if self.kind == "<i8" and state[1] not in ("<", b"<"):
            self.kind = None  # numbers of another machine's byte order


class _Array:
    value: NDArray[np.uint8] | NDArray[np.int64] | None = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[object, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, shape, dtype, fortran, content = state
        if fortran or not isinstance(dtype, _Dtype) or dtype.kind is None:
            raise NotPlainData("it holds an array of something else than bytes or whole numbers")
        self.value = np.frombuffer(content, dtype.kind).reshape(shape)


def _plain(value: Any) -> Any:
    """One level deep: lists inside lists could refer to each other without end."""
    if isinstance(value, list):
        return [_scalar(item) for item in value]
    if isinstance(value, _Array) and value.value is not None:
        return value.value
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise NotPlainData(f"it holds a {type(value).__name__.strip('_')}")
