"""Calls in flight that may write a container's cpuset at any moment, as values.

A StartContainer or UpdateContainerResources that was sent to the runtime carries the cpuset that was right
when it was sent. If a pool shrinks in the meantime and the kernel is written at once, the runtime may undo
that write when it executes the call. So a shrink first waits until such calls have completed, then writes and
reads back.

If a call gets no answer (its client went away, its deadline passed, the connection to the runtime was lost),
or a start was refused, the runtime may still execute it, or may have executed it already. Such a call stays
in flight as an *orphan*, until the runtime's list shows its end, or the runtime has answered other calls for
long enough. A runtime that hangs answers nothing, so its orphans stay. If two calls for one container
overlap, it is unknown which of them the runtime executed last, so neither shows what the runtime has saved.

A start that hangs need not delay anything once its container's cgroup exists, because the container can be
*confined* (``proxy.executor.confinement``). The call stays in flight until it completes.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from proxy.model.idset import CpuSet
from proxy.model.persistent_map import PersistentMap


class InflightCall(Struct, frozen=True, eq=False):
    """One call in flight.

    Values are compared by ``number`` only, so an updated value equals the earlier values of the same call.

    Attributes:
        number: The number of the call.
        container_id: The container that the call is for.
        carries: The cpuset that the runtime may write because of the call.
        is_start: Whether it is a start, not an update.
        sent_at: When it was sent, by the loop's clock.
        overlapped: Another call for the container was in flight at the same time.
        orphaned_since: When it became an orphan; None while its answer is awaited.
        answered_at: When the runtime first answered a call that was made after it became an orphan.
        refused: It is a start that the runtime has answered with an error; the runtime's next list shows its
            result.
        resend: When it is over, the runtime is sent the CPUs that the plan has at that time.
        suspected: It may not exist: an earlier run of the daemon may have sent it, or not.
        confined: The container is kept within its current cpuset while the call is in flight.
        relayed: It was forwarded while the node was being released; a release does not wait for it.
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

    def __ne__(self, other: object) -> bool:  # a struct defines its own __ne__
        return not self == other

    def __hash__(self) -> int:
        return self.number


def _overlapped(earlier: InflightCall, later: InflightCall) -> InflightCall:
    """Return a call in flight after another one was sent for the same container.

    The runtime executes a start with the cpuset that it has saved by then: perhaps that of a later update.
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
        """Return the calls in flight after one more was sent."""
        others = self.of(call.container_id)
        if others:
            overlapped = replace(call, overlapped=True)
            return self._with((*(_overlapped(other, call) for other in others), overlapped))
        return InflightCalls(self.calls.put(call.container_id, (call,)), self.confined)

    def removed(self, call: InflightCall) -> InflightCalls:
        """Return the calls in flight after one was answered, or was lost."""
        remaining = tuple(other for other in self.of(call.container_id) if other != call)
        if remaining:
            return self._with(remaining)
        return InflightCalls(self.calls.drop(call.container_id), self.confined - {call.container_id})

    def updated(self, call: InflightCall) -> InflightCalls:
        """Return the calls with a newer value of one of them; a call that is over stays so."""
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
        """Return the newest value of a call; None if it is over."""
        return next((other for other in self.of(call.container_id) if other == call), None)

    def is_busy(self, container_id: str) -> bool:
        """Return whether a call for the container is in flight."""
        return container_id in self.calls

    def is_starting(self, container_id: str) -> bool:
        """Return whether a start of the container is in flight."""
        return any(call.is_start for call in self.of(container_id))

    def is_awaited(self, container_id: str) -> bool:
        """Return whether a call whose answer is still awaited is in flight for a container."""
        return any(call.orphaned_since is None for call in self.of(container_id))

    def is_awaited_by_release(self, container_id: str) -> bool:
        """Return whether a call for a container is in flight for which a release has to wait.

        A release waits for a call if it was not relayed during the release, and if its answer is awaited, or
        the container's CPUs must be sent to the runtime after it.
        """
        return any(
            (call.orphaned_since is None or call.resend) and not call.relayed
            for call in self.of(container_id)
        )

    def is_confined(self, container_id: str) -> bool:
        """Return whether a container is confined."""
        return container_id in self.confined

    def orphans(self) -> list[InflightCall]:
        """Return the calls whose answers are no longer awaited."""
        return [call for calls in self.calls.values() for call in calls if call.orphaned_since is not None]

    def unattended(self) -> list[InflightCall]:
        """Return the orphans, and the calls that were relayed while the node was released."""
        in_flight = (call for calls in self.calls.values() for call in calls)
        return [call for call in in_flight if call.orphaned_since is not None or call.relayed]

    def conflicting_updates(self, container_id: str, cpus: CpuSet) -> list[InflightCall]:
        """Return the updates in flight that carry another cpuset to a container."""
        return [call for call in self.of(container_id) if not call.is_start and call.carries != cpus]

    def exceeding(self, limits: Iterable[tuple[str, CpuSet]], cpus: CpuSet) -> list[InflightCall]:
        """Return the calls in flight that put a container onto some of these CPUs, beyond its limit.

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
