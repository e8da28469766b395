"""From two readings of CPU time to CPUs in use. Pure.

Theory. A rate is what a counter grew by, divided by the time between. Groups come and go meanwhile:

* a group that was not there before, or whose counter has gone backwards (it was removed and made anew), has
  counted from zero; if it shows more than the machine could do in that time, it is older than our knowledge
  of it, and nothing is known of it for one round;
* what a group used before it went is in no counter but those above it. So the group above all BestEffort pods
  is read too, and what it has used beyond the pods that are there is theirs that are not.

A node's counter that goes backwards, or two readings at one moment, make no rates at all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from proxy.controller.kernel_ports import UsageReading

LEAST_NS = 10_000_000
"""Readings closer than this tell nothing: the node's own counter moves in steps of so much."""


@dataclass(frozen=True, slots=True)
class Rates:
    """CPUs in use between two readings.

    Attributes:
        node: On the whole node.
        groups: By key of who was asked for; who is not known is left out.
    """

    node: float
    groups: Mapping[str, float]


def rates(before: UsageReading, after: UsageReading, cpus: int) -> Rates | None:
    """Compute the CPUs in use.

    Args:
        before: The earlier reading.
        after: The later one.
        cpus: How many CPUs there are: nobody can use more.

    Returns:
        The rates; None where the readings tell nothing.
    """
    elapsed = after.at - before.at
    if elapsed < LEAST_NS or after.node < before.node:
        return None
    most = elapsed * cpus
    found: dict[str, float] = {}
    for key, counters in after.groups.items():
        known = before.groups.get(key, {})
        grown = [_growth(known.get(path), now, most) for path, now in counters.items()]
        told = [each for each in grown if each is not None]
        if told:
            found[key] = min(sum(told), most) / elapsed
    return Rates(min(after.node - before.node, most) / elapsed, found)


def _growth(before: int | None, now: int, most: int) -> int | None:
    if before is not None and now >= before:
        return now - before
    return now if now <= most else None


def gone(above: float | None, inside: Collection[str], groups: Mapping[str, float]) -> float:
    """Give what pods used that are no longer there.

    Args:
        above: CPUs in use in the group above them all; None where that is not known.
        inside: Keys of those below it that are there.
        groups: CPUs in use by key.
    """
    return 0.0 if above is None else max(0.0, above - sum(groups.get(key, 0.0) for key in inside))
