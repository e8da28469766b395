"""Writing data in commands."""

from __future__ import annotations

import json
from typing import Any


def in_json(data: Any) -> str:
    """Write data as JSON that every output can take: what is no text (lone surrogates) is escaped."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(data, indent=1)
    return text
