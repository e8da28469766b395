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

from msgspec import Struct, structs

from proxy.engine.explain_record import explain_pooled
from proxy.executor.decision_records import (
    PodDecisions,
    RecordSubject,
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
"""How many of the oldest and of the newest reasons are kept if more and more are added to a record."""


class _Record(Struct, frozen=True):
    """A record of one decision.

    Attributes:
        number: Its number, in the order of the records.
        when: The time, for display.
        subject: The decision, or the container if nothing was weighed.
        cpus: The CPUs of the container at that time.
        applied: Whether the decision was applied.
        event: Why the container was placed.
    """

    number: int
    when: float
    subject: RecordSubject
    cpus: CpuSet
    applied: bool
    event: str


class DecisionHistory:
    """The newest decisions."""

    def __init__(self, limit: int = 500) -> None:
        """Start empty.

        Args:
            limit: How many records of removed containers and of refusals are kept.
        """
        self.limit = limit
        self._count = 0
        self._living: dict[str, list[_Record]] = {}
        self._removed: OrderedDict[int, tuple[str, _Record]] = OrderedDict()  # numbers, oldest removal first
        self._named: dict[tuple[str, str], list[int]] = {}  # numbers of removed records, by pod and container

    def resize(self, limit: int) -> None:
        """Change how many records of removed containers and of refusals are kept; the newest stay."""
        self.limit = limit
        self._displace()

    @property
    def size(self) -> int:
        """The number of records."""
        return len(self._removed) + sum(map(len, self._living.values()))

    # -- recording ----------------------------------------------------------------------------------------

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
        record = _Record(
            self._count, when, explanation, explanation.cpus, explanation.applied, explanation.event
        )
        known, runs = container_id in self._living, explanation.verdict.admitted or not explanation.applied
        if known or (container_id and runs):
            self._living[container_id] = [*self._living.get(container_id, ()), record][-KEEP:]
        else:
            self._mark_removed(container_id, record)

    def note_without_explanation(
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
        records = self._living.get(container.id)
        if records is None:
            self._living[container.id] = [_Record(count, when, container, cpus, applied, event)]
        else:
            records.append(_Record(count, when, container, cpus, applied, event))
            del records[:-KEEP]

    def amend(self, container_id: str, text: str) -> None:
        """Add what has happened since to the newest record of a living container."""
        records = self._living.get(container_id)
        if not records:
            return
        explanation = _explanation(records[-1])
        reasons = (*explanation.reasons, message(text))
        if len(reasons) > FIRST + LAST:
            reasons = (*reasons[:FIRST], *reasons[-LAST:])
        records[-1] = _changed(records[-1], structs.replace(explanation, reasons=reasons))

    def mark_applied(self, container_id: str, text: str = "", *, applied: bool) -> None:
        """Record that the plan is applied to a living container from now on, or is not any more.

        If the plan is applied only after the container was created, the record keeps neither the containers
        that would have had to move at the create, nor the memory nodes: containers move in steps, and memory
        stays.

        Args:
            container_id: The container.
            text: What has happened, added to the reasons; nothing is added if the text is empty.
            applied: Whether the plan is applied.
        """
        if text:
            self.amend(container_id, text)
        records = self._living.get(container_id)
        if not records:
            return
        explanation = _explanation(records[-1])
        if not explanation.verdict.admitted:
            return  # a refusal that was not applied stays one: the container exists despite it
        if applied and not explanation.applied:
            explanation = structs.replace(explanation, moved=(), more_moved=0, mems=None)
        records[-1] = _changed(records[-1], structs.replace(explanation, applied=applied))

    def refused(self, token: str, verdict: Verdict) -> None:
        """Record that a container was refused elsewhere after it was placed here: the placement is void.

        Args:
            token: The token of the call. Its placement may have been withdrawn already.
            verdict: Why it was refused.
        """
        if records := self._living.get(token):
            records[-1] = _refused(records[-1], verdict)
            return
        for number, (container_id, record) in reversed(self._removed.items()):
            if container_id == token:
                self._removed[number] = "", _refused(record, verdict)
                return

    def renamed(self, token: str, container_id: str) -> None:
        """Move the records under a token to the container's id."""
        records = self._living.pop(token, None)
        if records is not None:
            self._living[container_id] = [*self._living.get(container_id, ()), *records][-KEEP:]

    def exists_despite_refusal(self, container: Container) -> bool:
        """Assign the record of a refusal that was not applied to the container that exists despite it.

        Returns:
            False if there is no such record.
        """
        numbers = self._named.get((pod_key(container), container.name))
        if not numbers:
            return False
        container_id, record = self._removed[numbers[-1]]
        refusal = record.subject
        if not isinstance(refusal, Explanation) or refusal.applied or refusal.verdict.admitted:
            return False
        if container_id or refusal.attempt != container.attempt:
            return False
        self._forget(numbers[-1])
        self._living[container.id] = [*self._living.get(container.id, ()), record][-KEEP:]
        return True

    def would_be_refused(self) -> list[RememberedDecision]:
        """Return the newest record of each container or pod if it is a refusal not applied, oldest first."""
        newest: dict[tuple[str, str], RememberedDecision] = {}
        for container_id, record, exists in self._all():
            subject, name = record.subject, _name_of(record)
            newest.pop(name, None)
            if isinstance(subject, Explanation) and not subject.applied and not subject.verdict.admitted:
                newest[name] = RememberedDecision(record.when, subject, container_id, exists)
        return list(newest.values())

    def removed(self, container_id: str) -> None:
        """Record that a container (or a sandbox) was removed, or was never created."""
        for record in self._living.pop(container_id, ()):
            self._mark_removed(container_id, record)

    def _mark_removed(self, container_id: str, record: _Record) -> None:
        numbers = self._named.setdefault(_name_of(record), [])
        numbers.append(record.number)
        self._removed[record.number] = (container_id, record)
        if len(numbers) > KEEP:
            self._forget(min(numbers))
        self._displace()

    def _displace(self) -> None:
        while len(self._removed) > self.limit:
            self._forget(next(iter(self._removed)))

    def _forget(self, number: int) -> None:
        _, record = self._removed.pop(number)
        name = _name_of(record)
        self._named[name].remove(number)
        if not self._named[name]:
            del self._named[name]

    # -- queries ------------------------------------------------------------------------------------------

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
            found = [(i, record, exists) for i, record, exists in known if matches(i, record.subject)]
            if found:
                return [RememberedDecision(r.when, _explanation(r), i, exists) for i, r, exists in found]
        return []

    def with_devices(self) -> list[RememberedDecision]:
        """Return the records of containers with devices, oldest first; not those of refused containers."""
        return [
            RememberedDecision(record.when, subject, container_id, exists)
            for container_id, record, exists in self._all()
            if isinstance(subject := record.subject, Explanation)
            and subject.container
            and subject.devices
            and (subject.verdict.admitted or not subject.applied)
        ]

    def pods(self) -> list[PodDecisions]:
        """Return all pods that have records, the one with the newest record last."""
        grouped: dict[tuple[str, str], list[tuple[_Record, bool]]] = {}
        for _, record, exists in self._all():
            key = (pod_ref(record.subject), pod_uid(record.subject))
            grouped.setdefault(key, []).append((record, exists))
        newest_last = sorted(grouped.items(), key=lambda item: item[1][-1][0].number)
        return [_pod_decisions(pod, uid, records) for (pod, uid), records in newest_last]

    def _all(self) -> list[tuple[str, _Record, bool]]:
        return sorted(self._each(), key=lambda item: item[1].number)

    def _each(self) -> Iterator[tuple[str, _Record, bool]]:
        for container_id, record in self._removed.values():
            yield container_id, record, False
        for container_id, records in self._living.items():
            for record in records:
                yield container_id, record, True


def _fitted(explanation: Explanation) -> Explanation:
    """Truncate the sentences of a decision that are too long."""
    if all(len(text) <= MESSAGE for text in (explanation.verdict.message, *explanation.reasons)):
        return explanation
    reasons = tuple(map(message, explanation.reasons))
    return structs.replace(explanation, verdict=_shortened(explanation.verdict), reasons=reasons)


def _shortened(verdict: Verdict) -> Verdict:
    return structs.replace(verdict, message=message(verdict.message))


def _explanation(record: _Record) -> Explanation:
    if isinstance(record.subject, Explanation):
        return record.subject
    explanation = explain_pooled(record.subject, record.cpus, record.event)
    return explanation if record.applied else structs.replace(explanation, applied=False)


def _refused(record: _Record, verdict: Verdict) -> _Record:
    """Return the record of a placement that is void: nothing was given, and no container had to move."""
    explanation = structs.replace(
        _explanation(record),
        verdict=_shortened(verdict),
        pool="",
        cpus=CpuSet(),
        mems=None,
        devices=(),
        moved=(),
        more_moved=0,
    )
    return _changed(record, explanation)


def _changed(record: _Record, explanation: Explanation) -> _Record:
    """Return a record with another explanation."""
    number, when = record.number, record.when
    return _Record(number, when, explanation, explanation.cpus, explanation.applied, explanation.event)


def _name_of(record: _Record) -> tuple[str, str]:
    """Return the pod and the container that a record is about."""
    return pod_key(record.subject), container_name(record.subject)


def _pod_decisions(pod: str, uid: str, records: list[tuple[_Record, bool]]) -> PodDecisions:
    newest, _ = records[-1]
    names = dict.fromkeys(name for record, _ in records if (name := container_name(record.subject)))
    verdict = newest.subject.verdict if isinstance(newest.subject, Explanation) else None
    refused = verdict.reason or "refused" if verdict is not None and not verdict.admitted else ""
    exists = any(exists for _, exists in records)
    return PodDecisions(pod, uid, newest.when, len(records), tuple(names), refused, exists, newest.applied)
