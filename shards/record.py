"""`build.json`: with which options, and from where, shards were built."""

from __future__ import annotations

import json
from typing import Any

from shards.base.storage import Store

RECORD = "build.json"


def read_record(store: Store) -> dict[str, Any] | None:
    """The options and input digest of the build in this store; None if there is none."""
    try:
        record = json.loads(store.read(RECORD, 1 << 20) or b"")
        return record if isinstance(record["options"], dict) and record["input"] else None
    except (ValueError, KeyError, TypeError):
        return None
