"""Secrets stay out of logs, messages, journals and checkpoints."""

from __future__ import annotations

import re
from typing import Any

_CREDENTIALS = re.compile(
    r"(?P<scheme>[a-zA-Z][\w+.-]*://)"
    r"(?:[^/\s\"]+@"  # up to the last @ of the host part: a password may hold one
    r"|[^/\s\"@]+:(?!\d*(?:[/?#\s\"']|$))[^\s\"]*@)"  # a password with a slash; `host:5000/a@b` has none
)
_SECRET_NAME = r"[\w.-]*(?:password|passwd|token|secret|signature|credential|(?:api|access)[_-]?key)[\w.-]*"
_SECRET_ARGUMENT = re.compile(rf"(?i)(?P<name>[?&;#](?:{_SECRET_NAME}|sig|key|auth|pwd)=)[^&;\s'\"]+")


def redact(text: str) -> str:
    """The text with `***` for user names, passwords and tokens in URLs.

    Of a query only the values of secret arguments go (`?X-Amz-Signature=***&x=1`): the rest tells files apart.
    """
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
