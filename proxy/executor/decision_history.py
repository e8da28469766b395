"""The decisions that are kept for later queries. Bounded; a pure data structure.

The records of existing containers are kept as long as the containers exist. The records of removed
containers, and of refusals, are kept until newer ones displace them: at most ``KEEP`` for one container (it
may be refused or restarted again and again), and at most the history's limit in all.

A placement in a pool for which nothing was weighed is recorded on the hot path of creates. So only references
to it are kept; its explanation is made when it is queried.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from msgspec import structs

from proxy.engine.explain_record import explain_pooled
from proxy.executor.decision_records import (
    PodDecisions,
    RememberedDecision,
    container_name,
    pod_key,
    pod_ref,
    pod_uid,
    query_matchers,
)
from proxy.model.explanation import CREATE, Explanation
from proxy.model.idset import CpuSet
from proxy.model.quoting import MESSAGE, message
from proxy.model.workload import Container, Verdict

KEEP = 5
"""How many records are kept of one living container, and of the removed containers of its name."""

FIRST, LAST = 4, 6
"""How many reasons are kept when ever more are added to a record: the oldest, and the newest."""

_Entry = tuple[int, float, Explanation | Container, CpuSet, bool, str]
"""Number, time and subject of the record; of a simple one its CPUs, whether it is applied, its event."""


class DecisionHistory:
    """The newest decisions."""

    def __init__(self, limit: int = 500) -> None:
        """Start empty.

        Args:
            limit: How many records of removed containers and of refusals are kept.
        """
        self.limit = limit
        self._count = 0
        self._living: dict[str, list[_Entry]] = {}
        self._removed: OrderedDict[int, tuple[str, _Entry]] = OrderedDict()  # in the order of removal
        self._named: dict[tuple[str, str], list[int]] = {}  # removed ones, by pod and container

    def resize(self, limit: int) -> None:
        """Keep another number of records of removed containers and of refusals, the newest."""
        self.limit = limit
        self._displace()

    @property
    def size(self) -> int:
        """The number of records."""
        return len(self._removed) + sum(map(len, self._living.values()))

    # -- taking note --------------------------------------------------------------------------------------

    def note(self, when: float, explanation: Explanation, container_id: str = "") -> None:
        """Record a decision.

        Args:
            when: The time, for display.
            explanation: The decision.
            container_id: The container's id, or the token of the call until the container has an id; for a
                decision about a pod, its sandbox's. Without an id the removal cannot be detected, so the
                record counts among those of removed containers.
        """
        self._count += 1
        explanation = _fitted(explanation)
        entry = (self._count, when, explanation, explanation.cpus, explanation.applied, explanation.event)
        known, runs = container_id in self._living, explanation.verdict.admitted or not explanation.applied
        if known or (container_id and runs):
            self._living[container_id] = [*self._living.get(container_id, ()), entry][-KEEP:]
        else:
            self._mark_removed(container_id, entry)

    def note_simple(
        self, when: float, container: Container, cpus: CpuSet, *, applied: bool = True, event: str = CREATE
    ) -> None:
        """Record a placement for which nothing was weighed.

        Args:
            when: The time, for display.
            container: The container as placed; its id may be the token of the call.
            cpus: The current CPUs of its pool.
            applied: Whether the plan is applied to it.
            event: Why it was placed.
        """
        self._count = count = self._count + 1
        entries = self._living.get(container.id)
        if entries is None:
            self._living[container.id] = [(count, when, container, cpus, applied, event)]
        else:
            entries.append((count, when, container, cpus, applied, event))
            del entries[:-KEEP]

    def amend(self, container_id: str, text: str) -> None:
        """Add what has happened since to the newest record of a living container."""
        entries = self._living.get(container_id)
        if not entries:
            return
        explanation = _explanation(entries[-1])
        reasons = (*explanation.reasons, message(text))
        if len(reasons) > FIRST + LAST:
            reasons = (*reasons[:FIRST], *reasons[-LAST:])
        entries[-1] = _changed(entries[-1], structs.replace(explanation, reasons=reasons))

    def mark_applied(self, container_id: str, text: str = "", *, applied: bool) -> None:
        """Note that the plan is applied to a living container from now on, or is not any more.

        Where it is applied after the container was created, the record keeps neither the containers that
        would have had to move then, nor the memory nodes: steps move containers, and memory stays.

        Args:
            container_id: The container.
            text: What has happened, added to the reasons; nothing is added where they are empty.
            applied: Whether the plan is applied.
        """
        if text:
            self.amend(container_id, text)
        entries = self._living.get(container_id)
        if not entries:
            return
        explanation = _explanation(entries[-1])
        if not explanation.verdict.admitted:
            return  # It says that the container would have been refused.
        if applied and not explanation.applied:
            explanation = structs.replace(explanation, moved=(), more_moved=0, mems=None)
        entries[-1] = _changed(entries[-1], structs.replace(explanation, applied=applied))

    def refused(self, token: str, verdict: Verdict) -> None:
        """Note that a container was refused elsewhere after it was placed here: the placement is void.

        Args:
            token: The token of the call. Its placement may have been withdrawn already.
            verdict: Why it was refused.
        """
        if entries := self._living.get(token):
            entries[-1] = _refused(entries[-1], verdict)
            return
        for number, (container_id, entry) in reversed(self._removed.items()):
            if container_id == token:
                self._removed[number] = "", _refused(entry, verdict)
                return

    def renamed(self, token: str, container_id: str) -> None:
        """Move the records under a token to the container's id."""
        entries = self._living.pop(token, None)
        if entries is not None:
            self._living[container_id] = [*self._living.get(container_id, ()), *entries][-KEEP:]

    def exists_despite_refusal(self, container: Container) -> bool:
        """Assign the record of a refusal that was not applied to the container that exists despite it.

        Returns:
            False where there is no such record.
        """
        numbers = self._named.get((container.pod.uid or container.pod.ref, container.name))
        if not numbers:
            return False
        container_id, entry = self._removed[numbers[-1]]
        what = entry[2]
        if not isinstance(what, Explanation) or what.applied or what.verdict.admitted or container_id:
            return False
        if what.attempt != container.attempt:
            return False
        self._forget(numbers[-1])
        self._living[container.id] = [*self._living.get(container.id, ()), entry][-KEEP:]
        return True

    def would_be_refused(self) -> list[RememberedDecision]:
        """Return the newest refusal of each container or pod that was not applied, the oldest first."""
        newest: dict[tuple[str, str], RememberedDecision] = {}
        for container_id, entry, exists in self._all():
            what, name = entry[2], (pod_key(entry[2]), container_name(entry[2]))
            newest.pop(name, None)
            if isinstance(what, Explanation) and not what.applied and not what.verdict.admitted:
                newest[name] = RememberedDecision(entry[1], what, container_id, exists)
        return list(newest.values())

    def removed(self, container_id: str) -> None:
        """Note that a container (or a sandbox) was removed, or was never created."""
        for entry in self._living.pop(container_id, ()):
            self._mark_removed(container_id, entry)

    def _mark_removed(self, container_id: str, entry: _Entry) -> None:
        number, what = entry[0], entry[2]
        mates = self._named.setdefault((pod_key(what), container_name(what)), [])
        mates.append(number)
        self._removed[number] = (container_id, entry)
        if len(mates) > KEEP:
            self._forget(min(mates))
        self._displace()

    def _displace(self) -> None:
        while len(self._removed) > self.limit:
            self._forget(next(iter(self._removed)))

    def _forget(self, number: int) -> None:
        _, entry = self._removed.pop(number)
        name = (pod_key(entry[2]), container_name(entry[2]))
        self._named[name].remove(number)
        if not self._named[name]:
            del self._named[name]

    # -- asking -------------------------------------------------------------------------------------------

    def find(self, query: str) -> list[RememberedDecision]:
        """Return the records that match a query, oldest first.

        Args:
            query: ``pod``, ``namespace/pod``, ``pod/container``, ``namespace/pod/container``, a pod's uid, a
                container's id as ``kubectl`` shows it (``containerd://ID``), or the beginning of a uid or id
                of at least 8 characters. The first of these readings that matches a record is used.
        """
        wanted = query.strip().rpartition("://")[2].strip("/")
        known = self._all()
        for matches in query_matchers(wanted):
            found = [(i, entry, exists) for i, entry, exists in known if matches(i, entry[2])]
            if found:
                return [RememberedDecision(e[1], _explanation(e), i, exists) for i, e, exists in found]
        return []

    def with_devices(self) -> list[RememberedDecision]:
        """Return the records of containers with devices, oldest first; not those of refused containers."""
        return [
            RememberedDecision(entry[1], what, container_id, exists)
            for container_id, entry, exists in self._all()
            if isinstance(what := entry[2], Explanation)
            and what.container
            and what.devices
            and (what.verdict.admitted or not what.applied)
        ]

    def pods(self) -> list[PodDecisions]:
        """Return all pods that have records, the one with the newest record last."""
        grouped: dict[tuple[str, str], list[tuple[_Entry, bool]]] = {}
        for _, entry, exists in self._all():
            key = (pod_ref(entry[2]), pod_uid(entry[2]))
            grouped.setdefault(key, []).append((entry, exists))
        lines = sorted(grouped.items(), key=lambda line: line[1][-1][0][0])
        return [_line(pod, uid, entries) for (pod, uid), entries in lines]

    def _all(self) -> list[tuple[str, _Entry, bool]]:
        return sorted(self._each(), key=lambda known: known[1][0])

    def _each(self) -> Iterator[tuple[str, _Entry, bool]]:
        for container_id, entry in self._removed.values():
            yield container_id, entry, False
        for container_id, entries in self._living.items():
            for entry in entries:
                yield container_id, entry, True


def _fitted(explanation: Explanation) -> Explanation:
    """Truncate the sentences of a decision that are too long."""
    if all(len(text) <= MESSAGE for text in (explanation.verdict.message, *explanation.reasons)):
        return explanation
    reasons = tuple(map(message, explanation.reasons))
    return structs.replace(explanation, verdict=_shortened(explanation.verdict), reasons=reasons)


def _shortened(verdict: Verdict) -> Verdict:
    return structs.replace(verdict, message=message(verdict.message))


def _explanation(entry: _Entry) -> Explanation:
    _, _, what, cpus, applied, event = entry
    if isinstance(what, Explanation):
        return what
    simple = explain_pooled(what, cpus, event)
    return simple if applied else structs.replace(simple, applied=False)


def _refused(entry: _Entry, verdict: Verdict) -> _Entry:
    """Return the record of a placement that is void: nothing was given, and no container had to move."""
    explanation = structs.replace(
        _explanation(entry),
        verdict=_shortened(verdict),
        pool="",
        cpus=CpuSet(),
        mems=None,
        devices=(),
        moved=(),
        more_moved=0,
    )
    return _changed(entry, explanation)


def _changed(entry: _Entry, explanation: Explanation) -> _Entry:
    """Return a record with another explanation."""
    return entry[0], entry[1], explanation, explanation.cpus, explanation.applied, explanation.event


def _line(pod: str, uid: str, entries: list[tuple[_Entry, bool]]) -> PodDecisions:
    newest = entries[-1][0]
    names = dict.fromkeys(name for entry, _ in entries if (name := container_name(entry[2])))
    what = newest[2]
    verdict = what.verdict if isinstance(what, Explanation) else None
    refused = verdict.reason or "refused" if verdict is not None and not verdict.admitted else ""
    exists = any(exists for _, exists in entries)
    return PodDecisions(pod, uid, newest[1], len(entries), tuple(names), refused, exists, newest[4])
