"""The mark of a node that has no room for a pod: when it is set, and when it is removed. Pure.

Theory. The scheduler counts CPUs and does not see why a pod did not fit: the free CPUs are on several NUMA
nodes, the floor of the shared pool must stay, or a rule of the operator forbids it. Whether the pod would fit
is known only when it comes again. So the mark is removed as soon as the pod may fit: when some NUMA node has
more free CPUs than when the pod was rejected, and the node has as many free CPUs as the pod requested. If
nothing changes, the mark is removed after a time, because a rule may have changed, or smaller pods may come.

The mark is an annotation of the Node object with the facts below, so an agent that restarts continues
with it, and a taint if the operator wants one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from proxy.agent.objects.node_page import NodePage, all_cpus
from proxy.config.cluster import KeepAway

KEY = "topoproxy.io/no-room"
"""The annotation, and the taint."""
_EFFECTS = {KeepAway.PREFER_NO_SCHEDULE: "PreferNoSchedule", KeepAway.NO_SCHEDULE: "NoSchedule"}

Free = Mapping[int, int]
"""NUMA node to CPUs that could be owned."""


class NodeMark(Struct, frozen=True):
    """Why a node is marked.

    Attributes:
        since: When the last pod was ended, in seconds since the epoch.
        cpus: The fewest whole CPUs that one of the pods requested.
        free: The free CPUs at that time.
    """

    since: float
    cpus: int
    free: Free


def marked(before: NodeMark | None, cpus: Iterable[int], free: Free, now: float) -> NodeMark:
    """Return the mark after pods have ended because they were rejected.

    Args:
        before: The mark until then; None for none.
        cpus: The whole CPUs that each of the pods requested.
        free: The free CPUs now.
        now: Seconds since the epoch.
    """
    fewest = min([*cpus, *([] if before is None else [before.cpus])], default=0)
    return NodeMark(now, fewest, dict(free))


def is_over(mark: NodeMark, free: Free, keep_away_for: float, now: float) -> bool:
    """Return whether a mark must be removed.

    Args:
        mark: The mark.
        free: The free CPUs now.
        keep_away_for: Seconds after which it is removed in any case.
        now: Seconds since the epoch.
    """
    if not 0 <= now - mark.since < keep_away_for:
        return True
    more = any(count > mark.free.get(node, 0) for node, count in free.items())
    return more and sum(free.values()) >= mark.cpus


def free_cpus(page: NodePage) -> dict[int, int]:
    """Return how many CPUs of each NUMA node a new owner may get."""
    free = all_cpus([page.free])
    counts: dict[int, int] = {}
    for cpu, _core, _socket, node in page.cpus:
        counts[node] = counts.get(node, 0) + (cpu in free)
    return counts


def as_annotation(mark: NodeMark) -> str:
    """Return the value of the annotation."""
    free = {str(node): count for node, count in sorted(mark.free.items())}
    return json.dumps({"since": round(mark.since, 3), "cpus": mark.cpus, "free": free})


def from_annotation(text: str) -> NodeMark | None:
    """Read the annotation; None if it is not ours."""
    try:
        value = json.loads(text)
        free = {int(node): int(count) for node, count in value["free"].items()}
        return NodeMark(float(value["since"]), int(value["cpus"]), free)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def node_patch(node: Mapping[str, Any], mark: NodeMark | None, keep_away: KeepAway) -> dict[str, Any] | None:
    """Return the merge patch that sets the mark of a Node object, or removes it; None if none is needed.

    Taints are a list, and others have entries in it. So the patch holds the whole list, and the version of
    the object from which it was made.

    Args:
        node: The object as it was read.
        mark: The mark; None for none.
        keep_away: The taint that goes with it.
    """
    metadata = node.get("metadata") or {}
    text = (metadata.get("annotations") or {}).get(KEY)
    if keep_away is KeepAway.NONE:
        mark = None
    annotation = None if mark is None else as_annotation(mark)
    taints = [taint for taint in (node.get("spec") or {}).get("taints") or () if isinstance(taint, dict)]
    after = [taint for taint in taints if taint.get("key") != KEY]
    if mark is not None and keep_away in _EFFECTS:
        after.append({"key": KEY, "value": "true", "effect": _EFFECTS[keep_away]})
    present = [(taint.get("key"), taint.get("effect")) for taint in taints]
    same_taints = present == [(taint.get("key"), taint.get("effect")) for taint in after]
    if text == annotation and same_taints:
        return None
    patch: dict[str, Any] = {
        "metadata": {"resourceVersion": metadata.get("resourceVersion", ""), "annotations": {KEY: annotation}}
    }
    if not same_taints:
        patch["spec"] = {"taints": after or None}
    return patch
