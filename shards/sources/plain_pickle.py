"""The Python batches of CIFAR, read without running them.

These files are pickles, that is programs. Here their instructions are only listed, and the few that describe
plain data and arrays of bytes are followed by hand; any other instruction is refused.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np

_ARRAY = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
_NAMES = _ARRAY | {"numpy ndarray", "numpy dtype", "_codecs encode"}
_MARK = object()
_PUSH = {
    "INT",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
    "BINUNICODE",
}
_PUSH |= {"SHORT_BINUNICODE", "UNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINFLOAT"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_CONTAINERS: dict[str, Any] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class NotPlainData(Exception):
    """The file holds something else than numbers, texts and arrays of bytes."""


@dataclass(frozen=True)
class _Name:
    """A mention of something outside; never looked up."""

    text: str


@dataclass
class _Made:
    """What calling a known name would give."""

    name: str
    arguments: tuple
    state: tuple = ()


def read_batch(data: bytes) -> dict[str, Any]:
    """The dictionary in a batch file; arrays of bytes become NumPy arrays, byte strings become text."""
    try:
        tree = _follow(data)
        return {_text(key): _plain(value) for key, value in tree.items()}
    except NotPlainData:
        raise
    except Exception as error:  # cut or garbled instructions
        raise NotPlainData(f"damaged ({type(error).__name__})") from None


def _follow(data: bytes) -> dict[Any, Any]:
    stack: list[Any] = []
    memo: dict[Any, Any] = {}

    def since_mark() -> list[Any]:
        place = len(stack) - 1 - stack[::-1].index(_MARK)
        items = stack[place + 1 :]
        del stack[place:]
        return items

    for code, argument, _ in pickletools.genops(data):
        name = code.name
        if name in ("PROTO", "FRAME", "STOP"):
            continue
        elif name in _PUSH:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _CONTAINERS:
            stack.append(_CONTAINERS[name]())
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _TUPLES:
            items = tuple(stack[-_TUPLES[name] :])
            stack[-_TUPLES[name] :] = [items]
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name in ("APPEND", "APPENDS"):
            more = since_mark() if name == "APPENDS" else [stack.pop()]
            stack[-1].extend(more)
        elif name in ("SETITEM", "SETITEMS"):
            pairs = since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            stack[-1].update(zip(pairs[::2], pairs[1::2]))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            text = str(argument) if name == "GLOBAL" else f"{stack.pop(-2)} {stack.pop()}"
            if text not in _NAMES:
                raise NotPlainData(f"it wants to run '{text.replace(' ', '.')}'")
            stack.append(_Name(text))
        elif name == "REDUCE":
            arguments, called = stack.pop(), stack.pop()
            stack.append(_call(called, arguments))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        else:
            raise NotPlainData(f"it holds the instruction {name}")
    if not isinstance(stack[-1], dict):
        raise NotPlainData("it is no dictionary")
    return stack[-1]


def _call(called: Any, arguments: tuple) -> Any:
    if not isinstance(called, _Name):
        raise NotPlainData("it calls something that is no name")
    if called.text == "_codecs encode":  # how Python 3 writes bytes in an old protocol
        return arguments[0].encode("latin-1")
    return _Made(called.text, arguments)


def _plain(value: Any) -> Any:
    if isinstance(value, _Made):
        if value.name not in _ARRAY or len(value.state) != 5:
            raise NotPlainData("it holds an object that is no array")
        _, shape, kind, fortran, content = value.state
        if fortran or not isinstance(kind, _Made) or kind.arguments[0] not in ("u1", "|u1", "uint8"):
            raise NotPlainData("it holds an array of something else than bytes")
        raw = content.encode("latin-1") if isinstance(content, str) else content
        return np.frombuffer(raw, np.uint8).reshape(shape)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return _text(value)


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
