"""Errors the user can fix. Everything else is a bug and keeps its traceback."""

from __future__ import annotations

EXIT_USER_ERROR = 2


class UserError(Exception):
    """Something the person at the keyboard can fix. The message says what, where, and what to do."""


class Unreachable(UserError):
    """A store that does not answer now and may answer later. Unlike other user errors it is worth a retry."""
