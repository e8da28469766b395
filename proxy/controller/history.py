"""What is remembered of decisions, for people who ask later. Bounded; a pure data structure.

The records of containers that are there stay as long as they are. Those of containers that are gone, and of
what was refused, stay until newer ones push them out: at most ``KEEP`` of one container (it may be refused
or restarted again and again), and at most the history's limit in all.

A placement in a pool where nothing was weighed is in the way of every create, so only references are kept
of it; its explanation is made when somebody asks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from msgspec import structs

from proxy.controller.decision_log import (
    PodLine,
    RememberedDecision,
    container_name,
    meanings,
    pod_key,
    pod_ref,
    pod_uid,
)
from proxy.engine.explain_record import explain_pooled
from proxy.model.explanation import Explanation
from proxy.model.idset import CpuSet
from proxy.model.quoting import MESSAGE, message
from proxy.model.workload import Container, Verdict

KEEP = 5
"""How many records stay of one living container, and of those of its name that are gone."""

FIRST, LAST = 4, 6
"""How many sentences stay where more and more happens to a container: the oldest, and the newest."""

_Entry = tuple[int, float, Explanation | Container, CpuSet]
"""Number of the record, when, what, and the CPUs of a simple placement."""


class History:
    """The newest decisions."""

    def __init__(self, limit: int = 500) -> None:
        """Begin with nothing.

        Args:
            limit: How many records of what is gone or refused are kept.
        """
        self.limit = limit
        self._count = 0
        self._living: dict[str, list[_Entry]] = {}
        self._gone: OrderedDict[int, tuple[str, _Entry]] = OrderedDict()  # in the order of going
        self._named: dict[tuple[str, str], list[int]] = {}  # those that are gone, by pod and container

    @property
    def size(self) -> int:
        """How many records there are."""
        return len(self._gone) + sum(map(len, self._living.values()))

    # -- taking note --------------------------------------------------------------------------------------

    def note(self, when: float, explanation: Explanation, container_id: str = "") -> None:
        """Remember a decision.

        Args:
            when: The time, for people.
            explanation: The decision.
            container_id: Who it is about: the container's id, or the token of the call until it has one; for
                a decision about a pod, its sandbox's. Without one, nobody can tell when it goes, so the
                record counts among those of what is gone.
        """
        self._count += 1
        explanation = _fitted(explanation)
        entry = (self._count, when, explanation, explanation.cpus)
        known = container_id in self._living
        if known or (container_id and explanation.verdict.admitted):
            self._living[container_id] = [*self._living.get(container_id, ()), entry][-KEEP:]
        else:
            self._bury(container_id, entry)

    def note_simple(self, when: float, container: Container, cpus: CpuSet) -> None:
        """Remember a placement for which nothing was weighed.

        Args:
            when: The time, for people.
            container: The container as placed; its id may be the token of the call.
            cpus: The CPUs of its pool now.
        """
        self._count = count = self._count + 1
        entries = self._living.get(container.id)
        if entries is None:
            self._living[container.id] = [(count, when, container, cpus)]
        else:
            entries.append((count, when, container, cpus))
            del entries[:-KEEP]

    def amend(self, container_id: str, words: str) -> None:
        """Add to the newest record of a container that is there what has happened to it since."""
        entries = self._living.get(container_id)
        if not entries:
            return
        number, when, _, cpus = entries[-1]
        told = _explanation(entries[-1])
        reasons = (*told.reasons, message(words))
        if len(reasons) > FIRST + LAST:
            reasons = (*reasons[:FIRST], *reasons[-LAST:])
        entries[-1] = (number, when, structs.replace(told, reasons=reasons), cpus)

    def refused(self, token: str, verdict: Verdict) -> None:
        """What was decided for a container comes to nothing: somebody else has refused it."""
        entries = self._living.get(token)
        if entries:
            number, when, _, cpus = entries[-1]
            entries[-1] = (
                number,
                when,
                structs.replace(_explanation(entries[-1]), verdict=_said(verdict)),
                cpus,
            )

    def renamed(self, token: str, container_id: str) -> None:
        """What had a token has an id now."""
        entries = self._living.pop(token, None)
        if entries is not None:
            self._living[container_id] = [*self._living.get(container_id, ()), *entries][-KEEP:]

    def gone(self, container_id: str) -> None:
        """A container (or a sandbox) is gone, or was never made."""
        for entry in self._living.pop(container_id, ()):
            self._bury(container_id, entry)

    def _bury(self, container_id: str, entry: _Entry) -> None:
        number, what = entry[0], entry[2]
        mates = self._named.setdefault((pod_key(what), container_name(what)), [])
        mates.append(number)
        self._gone[number] = (container_id, entry)
        if len(mates) > KEEP:
            self._forget(min(mates))
        while len(self._gone) > self.limit:
            self._forget(next(iter(self._gone)))

    def _forget(self, number: int) -> None:
        _, entry = self._gone.pop(number)
        name = (pod_key(entry[2]), container_name(entry[2]))
        self._named[name].remove(number)
        if not self._named[name]:
            del self._named[name]

    # -- asking -------------------------------------------------------------------------------------------

    def find(self, query: str) -> list[RememberedDecision]:
        """Give the records of whom a text may mean, oldest first.

        Args:
            query: ``pod``, ``namespace/pod``, ``pod/container``, ``namespace/pod/container``, a pod's uid, a
                container's id as ``kubectl`` shows it (``containerd://ID``), or the beginning of a uid or id
                of at least 8 characters. The first of these that leads to something counts.
        """
        wanted = query.strip().rpartition("://")[2].strip("/")
        known = self._all()
        for means in meanings(wanted):
            found = [(i, entry, there) for i, entry, there in known if means(i, entry[2])]
            if found:
                return [RememberedDecision(e[1], _explanation(e), i, there) for i, e, there in found]
        return []

    def pods(self) -> list[PodLine]:
        """Give all pods of which something is remembered, the one with the newest record last."""
        grouped: dict[tuple[str, str], list[tuple[_Entry, bool]]] = {}
        for _, entry, there in self._all():
            key = (pod_ref(entry[2]), pod_uid(entry[2]))
            grouped.setdefault(key, []).append((entry, there))
        lines = sorted(grouped.items(), key=lambda line: line[1][-1][0][0])
        return [_line(pod, uid, entries) for (pod, uid), entries in lines]

    def _all(self) -> list[tuple[str, _Entry, bool]]:
        return sorted(self._each(), key=lambda known: known[1][0])

    def _each(self) -> Iterator[tuple[str, _Entry, bool]]:
        for container_id, entry in self._gone.values():
            yield container_id, entry, False
        for container_id, entries in self._living.items():
            for entry in entries:
                yield container_id, entry, True


def _fitted(told: Explanation) -> Explanation:
    """Cut the sentences of a decision that are too long."""
    if all(len(words) <= MESSAGE for words in (told.verdict.message, *told.reasons)):
        return told
    reasons = tuple(map(message, told.reasons))
    return structs.replace(told, verdict=_said(told.verdict), reasons=reasons)


def _said(verdict: Verdict) -> Verdict:
    return structs.replace(verdict, message=message(verdict.message))


def _explanation(entry: _Entry) -> Explanation:
    what = entry[2]
    return what if isinstance(what, Explanation) else explain_pooled(what, entry[3])


def _line(pod: str, uid: str, entries: list[tuple[_Entry, bool]]) -> PodLine:
    newest = entries[-1][0]
    names = dict.fromkeys(name for entry, _ in entries if (name := container_name(entry[2])))
    verdict = newest[2].verdict if isinstance(newest[2], Explanation) else None
    refused = verdict.reason or "refused" if verdict is not None and not verdict.admitted else ""
    there = any(there for _, there in entries)
    return PodLine(pod, uid, newest[1], len(entries), tuple(names), refused, there)
