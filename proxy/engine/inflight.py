"""Calls in flight that may write a container's cpuset at any moment, as values.

A StartContainer or UpdateContainerResources that was sent to the runtime carries the cpuset that was right
when it was sent. If a pool shrinks meanwhile, a kernel write could be undone when the runtime gets to it. So
a shrink first waits until such calls have completed, and only then writes and reads back.

A call that gets no answer (its client went away, its deadline passed, the runtime was lost), and a start that
was refused, may still be executed by the runtime, or have been executed already. It stays in flight as an
*orphan*, until the runtime's list shows its end, or the runtime has answered other calls for long enough. A
runtime that hangs answers nothing, so its orphans stay. When two calls for one container overlap, it is not
known which one the runtime executed last: neither shows what the runtime has saved.

A start that hangs need not delay anything once its container's cgroup exists: the container is *confined*
(``proxy.executor.confinement``). Its call stays in flight until it completes.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from proxy.model.idset import CpuSet
from proxy.model.persistent_map import PersistentMap


class InflightCall(Struct, frozen=True, eq=False):
    """One call in flight.

    Values are compared by ``number`` only, so an updated value equals the earlier ones.

    Attributes:
        number: Which call it is.
        container_id: The container that it is for.
        carries: The cpuset that it brings.
        is_start: A start, not an update.
        sent_at: When it was sent, by the loop's clock.
        overlapped: Another call for the container was in flight at the same time.
        orphaned_since: When it became an orphan; None while its answer is waited for.
        answered_at: When the runtime first answered a call that was made after that.
        refused: It is a start that the runtime has answered with an error: its next list is right about it.
        resend: When it is over, the runtime is sent the CPUs that are right then.
        suspected: It is not known to exist: an earlier run of the daemon may have sent it.
        confined: The container is kept within its current cpuset while the call is in flight.
        relayed: It was sent on while the node was released: a release does not wait for it.
    """

    number: int
    container_id: str
    carries: CpuSet
    is_start: bool = False
    sent_at: float = 0.0
    overlapped: bool = False
    orphaned_since: float | None = None
    answered_at: float | None = None
    refused: bool = False
    resend: bool = True
    suspected: bool = False
    confined: bool = False
    relayed: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InflightCall) and self.number == other.number

    def __ne__(self, other: object) -> bool:  # a struct has its own
        return not self == other

    def __hash__(self) -> int:
        return self.number


def _overlapped(earlier: InflightCall, later: InflightCall) -> InflightCall:
    """Return a call in flight after another one was sent for the same container.

    A start brings what the runtime has saved when it gets to it: perhaps what a later update has brought.
    """
    carries = earlier.carries | later.carries if earlier.is_start else earlier.carries
    return replace(earlier, overlapped=True, carries=carries)


_NO_CALLS: PersistentMap[tuple[InflightCall, ...]] = PersistentMap()


class InflightCalls(Struct, frozen=True):
    """All calls in flight.

    Attributes:
        calls: The calls by container id, in the order in which they were sent.
        confined: Ids of the containers that are confined.
    """

    calls: PersistentMap[tuple[InflightCall, ...]] = _NO_CALLS
    confined: frozenset[str] = frozenset()

    # -- changes ------------------------------------------------------------------------------------------

    def added(self, call: InflightCall) -> InflightCalls:
        """Return the calls with one that was sent last."""
        others = self.of(call.container_id)
        if others:
            overlapped = replace(call, overlapped=True)
            return self._with((*(_overlapped(other, call) for other in others), overlapped))
        return InflightCalls(self.calls.put(call.container_id, (call,)), self.confined)

    def removed(self, call: InflightCall) -> InflightCalls:
        """Return the calls without one that was answered, or is lost."""
        remaining = tuple(other for other in self.of(call.container_id) if other != call)
        if remaining:
            return self._with(remaining)
        return InflightCalls(self.calls.drop(call.container_id), self.confined - {call.container_id})

    def updated(self, call: InflightCall) -> InflightCalls:
        """Return the calls with the newest value of one; one that is over stays so."""
        calls = tuple(call if other == call else other for other in self.of(call.container_id))
        return self._with(calls) if calls else self

    def _with(self, calls: tuple[InflightCall, ...]) -> InflightCalls:
        container_id, confined = calls[0].container_id, self.confined
        if any(call.confined for call in calls) is not (container_id in confined):
            confined ^= {container_id}
        return InflightCalls(self.calls.put(container_id, calls), confined)

    # -- queries ------------------------------------------------------------------------------------------

    def of(self, container_id: str) -> tuple[InflightCall, ...]:
        """Return the calls in flight for a container."""
        return self.calls.get(container_id) or ()

    def current(self, call: InflightCall) -> InflightCall | None:
        """Return the newest value of a call; None where it is over."""
        return next((other for other in self.of(call.container_id) if other == call), None)

    def is_busy(self, container_id: str) -> bool:
        """Return whether a call for the container is in flight."""
        return container_id in self.calls

    def is_starting(self, container_id: str) -> bool:
        """Return whether a start of the container is in flight."""
        return any(call.is_start for call in self.of(container_id))

    def is_awaited(self, container_id: str) -> bool:
        """Return whether a call whose answer is still waited for is in flight for a container."""
        return any(call.orphaned_since is None for call in self.of(container_id))

    def is_awaited_by_release(self, container_id: str) -> bool:
        """Return whether a call is in flight for a container that a release has to wait for.

        Its answer is awaited, or the runtime is to be sent the container's CPUs after it, and it was not
        relayed during the release.
        """
        return any(
            (call.orphaned_since is None or call.resend) and not call.relayed
            for call in self.of(container_id)
        )

    def is_confined(self, container_id: str) -> bool:
        """Return whether a container is confined."""
        return container_id in self.confined

    def orphans(self) -> list[InflightCall]:
        """Return the calls whose answers are not waited for any more."""
        return [call for calls in self.calls.values() for call in calls if call.orphaned_since is not None]

    def unattended(self) -> list[InflightCall]:
        """Return the orphans, and the calls that were relayed while the node was released."""
        in_flight = (call for calls in self.calls.values() for call in calls)
        return [call for call in in_flight if call.orphaned_since is not None or call.relayed]

    def conflicting_updates(self, container_id: str, cpus: CpuSet) -> list[InflightCall]:
        """Return the updates in flight that carry another cpuset to a container."""
        return [call for call in self.of(container_id) if not call.is_start and call.carries != cpus]

    def exceeding(self, limits: Iterable[tuple[str, CpuSet]], cpus: CpuSet) -> list[InflightCall]:
        """Return the calls in flight that carry some of these CPUs to a container that must not have them.

        Args:
            limits: Container ids with the cpusets that they must not exceed.
            cpus: The CPUs.
        """
        return [
            call
            for container_id, limit in limits
            for call in self.of(container_id)
            if (call.carries - limit) & cpus
        ]
