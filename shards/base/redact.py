"""Secrets stay out of logs, messages, journals and checkpoints."""

from __future__ import annotations

import re
from typing import Any

_CREDENTIALS = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]*://)[^/\s\"]+@")  # to the last @: a password may hold one
_SECRET_ARGUMENT = re.compile(
    r"(?i)(?P<name>[?&;][\w.-]*(?:password|passwd|token|secret|signature|credential|(?:api|access)[_-]?key)[\w.-]*="
    r"|[?&;]sig=)[^&;\s'\"]+"
)


def redact(text: str) -> str:
    """The text with user names, passwords and tokens taken out of every URL in it."""
    return _SECRET_ARGUMENT.sub(r"\g<name>***", _CREDENTIALS.sub(r"\g<scheme>***@", text))


def one_line(error: BaseException) -> str:
    """What an error says, in one line without secrets; a server that is not there needs no stack of libraries."""
    text = next(iter(redact(str(error)).strip().splitlines()), type(error).__name__)
    if "Max retries exceeded" in text:
        reason = re.search(r"\[Errno -?\d+\] ([\w ]+)", text)
        return "no answer" + (f" ({reason[1]})" if reason else "")
    return text[:300].rstrip(". ")


def redact_all(value: Any) -> Any:
    """`redact` for every text inside lists and mappings."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_all(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact_all(inner) for inner in value]
    return value
