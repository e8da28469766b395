"""A released node on the page of ``topoproxy status``."""

from __future__ import annotations

from collections.abc import Mapping


def release(data: Mapping[str, object]) -> list[str]:
    """Return the lines; none where the node is not left.

    Args:
        data: The part ``release`` of ``/status``.
    """
    stage, left = data.get("stage"), data.get("left")
    if stage == "released":
        return [
            "release: calls are only relayed, containers are not moved (topoproxy release --undo resumes)"
        ]
    if stage != "releasing":
        return []
    lines = [
        f"release: {data.get('told')} of {data.get('containers')} containers updated, calls are only relayed"
    ]
    return lines + [f"  still: {words}" for words in (left if isinstance(left, list) else [])]
