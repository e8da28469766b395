"""CFS quotas of owners of CPUs: off while they own CPUs, and restored afterwards.

Theory of operation. A container with CPUs of its own needs no quota, and its pod's quota must not throttle it
either. ``proxy.engine.quotas`` decides which quotas are off and which are restored; this module carries that
out:

* Pods. No field of the CRI carries a pod's quota, so the kernel's file is written: before the first owner
  starts, and checked at reconciles. A quota that another program writes there while it should be off (kubelet
  at a resize, systemd at a daemon-reload) is the one that will be restored, and is removed again. If that
  continues, it is removed ever more rarely. The daemon records a pod's quota before it writes the file, so
  every other value there is drift, also at a start.
* Containers. The request that creates or updates a container carries -1. If a container runs with a quota,
  its file is written, and the quota is sent to the runtime (``runtime_sync``): otherwise the runtime's saved
  state undoes the write. An update is forwarded before its quota is in the ledger. So a value that differs
  from the record is no drift at a start, when the last daemon may have been killed in between, nor while a
  call for the container is in flight.

When an update of a client or a hook is sent, it changes the quota that will be restored; a refused update
must leave that quota as it was. Several updates may be in flight for one container. Each knows the record
before it. When one ends, the records of the others are corrected, so that every order of the answers has the
same result.

Order: a pod's quota is removed first and a container's is restored first, as cgroup v1 requires (see
``backends.cgroup.cfs_quota``). After a failure, that group is left without the feature, and the failure is
reported.

``OwnerQuotas`` reads and writes the kernel's files in the kernel worker's thread.
"""

from __future__ import annotations

import asyncio
import errno
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.engine import quotas as engine
from proxy.engine.quotas import CONTAINER_QUOTA, POD_QUOTA, QuotaPlace, QuotaRecord, RemovedQuotas
from proxy.executor.context import NodeContext
from proxy.executor.kernel_ports import CpuGroups
from proxy.executor.observer import Observer
from proxy.model.backoff import PassRetries
from proxy.model.errors import CgroupError
from proxy.model.workload import Container, Phase
from proxy.pools.claims import UNLIMITED
from proxy.telemetry import metrics

Errors = list[tuple[str, str]]
"""The ledger's key of a quota, and the error as text."""


def read_quotas(groups: CpuGroups, places: Mapping[str, QuotaPlace]) -> tuple[dict[str, QuotaRecord], Errors]:
    """Read quotas.

    Returns:
        The quotas by key, without groups that do not exist; and errors.
    """
    found: dict[str, QuotaRecord] = {}
    errors: Errors = []
    for key, (parent, container_id) in places.items():
        path = groups.find(parent, container_id) if container_id else groups.pod_group(parent)
        if path is None:
            continue
        try:
            found[key] = QuotaRecord(groups.quota(path), path)
        except CgroupError as error:
            if error.errno != errno.ENOENT:
                errors.append((key, str(error)))
    return found, errors


def remove_quotas(groups: CpuGroups, records: Iterable[tuple[str, QuotaRecord]]) -> Errors:
    """Remove quotas, in this order; groups that are gone have none."""
    errors: Errors = []
    for key, at in records:
        try:
            groups.set_quota(at.group, UNLIMITED)
        except CgroupError as error:
            if error.errno != errno.ENOENT:
                errors.append((key, str(error)))
    return errors


def restore_quotas(
    groups: CpuGroups, records: Iterable[tuple[str, tuple[QuotaRecord, QuotaPlace]]]
) -> tuple[dict[str, int | None], int, Errors]:
    """Restore quotas, in this order, if there is none now: a quota that another program wrote is newer.

    Returns:
        By key the quota in effect now (None: the group is gone), without those that failed; how many were
        written; and errors.
    """
    written, done = 0, dict[str, int | None]()
    errors: Errors = []
    for key, (at, (parent, container_id)) in records:
        path = at.group or groups.find(parent, container_id)
        try:
            now = None if path is None else groups.quota(path)
            if path is not None and now == UNLIMITED:
                groups.set_quota(path, at.quota)
                now, written = at.quota, written + 1
            done[key] = now
        except CgroupError as error:
            if error.errno == errno.ENOENT:
                done[key] = None
            else:
                errors.append((key, str(error)))
    return done, written, errors


@dataclass(slots=True, eq=False)
class QuotaUpdate:
    """An update in flight that requests another quota for a container.

    Attributes:
        container_id: The container.
        quota: The quota that it requests; -1 for none.
        former: The record that stays if the runtime refuses the update; None for none.
    """

    container_id: str
    quota: int
    former: QuotaRecord | None


class OwnerQuotas(Observer):
    """Removes quotas and restores them.

    Attributes:
        groups: The cpu controller's tree; None if there is none; quotas are not written then.
    """

    def __init__(self, context: NodeContext, groups: CpuGroups | None = None) -> None:
        self._context = context
        self.groups = groups
        self._lock = asyncio.Lock()
        self._removing, self._restoring = PassRetries(), PassRetries()
        self._not_removed: set[str] = set()
        """Records whose quota may still be in the kernel: if the recorded value is there, it is no drift."""
        self._not_compared: set[str] = set()
        """Records of containers that the last daemon made and that were not compared with the kernel yet."""
        self._is_due = False
        self._updates: defaultdict[str, list[QuotaUpdate]] = defaultdict(list)
        context.store.handle(engine.CpuControllerChecked(groups is not None))

    @property
    def active(self) -> bool:
        """True if quotas are written at all."""
        return engine.writes_quotas(self._context.state)

    @property
    def known(self) -> RemovedQuotas:
        """The quotas that were removed."""
        return self._context.store.state.facts.quotas

    def load(self, entries: Mapping[str, Mapping[str, object]]) -> None:
        """Load the records of the ledger; the first reconcile compares them with the kernel."""
        records, invalid = RemovedQuotas.load(entries)
        self._context.store.handle(engine.QuotasRead(records))
        self._not_removed.update(records)  # the last daemon may have ended before it removed them
        self._not_compared.update(key for key in records if key.startswith(CONTAINER_QUOTA))
        for key in invalid:
            self._context.telemetry.problem(
                "cannot use a record of the ledger", record=key, err="it is not a CFS quota"
            )

    def must_be_off(self, container: Container) -> bool:
        """Return whether a container's quota must be off now."""
        return engine.must_have_no_quota(self._context.state, container)

    def carried(self, container: Container) -> int:
        """Return the quota that a call to the runtime carries for a container; 0 to leave it unchanged."""
        return engine.carried_quota(self._context.state, container)

    # -- calls --------------------------------------------------------------------------------------------

    def created(self, token: str, container: Container) -> None:
        """See ``Observer``."""
        self._restore_pod_soon(container)

    def failed(self, token: str) -> None:
        """See ``Observer``."""
        self.restore_soon()

    def entered(self, container: Container, phase: Phase) -> None:
        """See ``Observer``."""
        self._restore_pod_soon(container)

    def removed(self, container: Container) -> None:
        """See ``Observer``."""
        self._restore_pod_soon(container)

    def requested_by_hook(self, container: Container, quota: int) -> int:
        """Record the quota that a hook requests for a container, and return the one that is sent.

        Args:
            container: The container.
            quota: The quota that the hook requests; 0 for none.

        Returns:
            The quota that replaces it; 0 to leave it unchanged.
        """
        effects = self._context.store.handle(engine.QuotaRequested(container.id, quota))
        return next(effect.quota for effect in effects if type(effect) is engine.QuotaCarried)

    def update_sent(self, container_id: str, quota: int, former: QuotaRecord | None) -> QuotaUpdate | None:
        """Register an update that is sent to the runtime; None if it requests no quota.

        Args:
            container_id: The container.
            quota: The quota that it requests; 0 for none.
            former: The record before the update was requested.
        """
        if not quota:
            return None
        update = QuotaUpdate(container_id, quota, former)
        self._updates[container_id].append(update)
        return update

    def update_ended(self, update: QuotaUpdate | None, *, refused: bool) -> None:
        """Record the end of an update; one without an answer may be in effect, so it counts as accepted."""
        if update is None:
            return
        in_flight = self._updates[update.container_id]
        place = in_flight.index(update)
        earlier, later = in_flight[:place], in_flight[place + 1 :]
        in_flight.remove(update)
        if not in_flight:
            del self._updates[update.container_id]
        if not refused:
            for each in earlier:
                each.former = QuotaRecord(update.quota) if update.quota > 0 else None
        elif later:
            later[0].former = update.former
        else:
            self._context.store.handle(engine.QuotaRefused(update.container_id, update.quota, update.former))

    def saved(self, container_id: str, quota: int) -> None:
        """Record that the runtime has saved a quota (0: the call carried none)."""
        self._context.store.handle(engine.QuotaSaved(container_id, quota))

    def mark_unsent(self, ids: Iterable[str]) -> None:
        """Send the quotas of containers to the runtime, which has saved other ones."""
        if chosen := tuple(ids):
            self._context.store.handle(engine.QuotasUnsent(chosen))
            self._context.sync_later(*chosen)

    def quota_refused(self, container_id: str) -> None:
        """Record that the runtime refused a quota: the one in the kernel is in effect; resending can wait."""
        self._restoring.failed(CONTAINER_QUOTA + container_id)

    def restore_soon(self) -> None:
        """Restore soon the quotas that need not be off: a container came, started, exited or went."""
        if self.known.records and self.active and not self._is_due:
            self._is_due = True
            self._context.spawn(self._restore_due())

    def _restore_pod_soon(self, container: Container) -> None:
        """Restore soon the quotas of a container's pod: the number of its containers may have changed."""
        containers = self._context.state.containers
        for key in self.known.records:
            other = containers.get(key.removeprefix(CONTAINER_QUOTA))
            is_same_pod = other is not None and other.pod.key == container.pod.key
            if is_same_pod or key in (POD_QUOTA + container.pod.key, CONTAINER_QUOTA + container.id):
                self.restore_soon()
                return

    async def _restore_due(self) -> None:
        self._is_due = False
        async with self._lock:
            await self._restore()

    async def before_start(self, container: Container) -> None:
        """Remove the quota of a container's pod, if the container must run without one."""
        if not self.must_be_off(container):
            return
        places = engine.removable(self._context.state, (container,))
        try:
            async with asyncio.timeout(self._context.options.call_timeout), self._lock:
                await self._remove({key: place for key, place in places.items() if key.startswith(POD_QUOTA)})
        except TimeoutError:
            self._context.telemetry.problem(
                "cannot remove the CFS quota of a pod in time", pod=container.pod.ref
            )

    async def once(self) -> None:
        """Compare all quotas that are off, or were, with the kernel."""
        if not self.active:
            return
        async with self._lock:
            self._restoring.start_pass(self.known.records)
            await self._restore()
            state = self._context.state
            places = engine.removable(state, engine.containers_without_quota(state))
            self._removing.start_pass(places)
            await self._remove({key: place for key, place in places.items() if self._removing.due(key)})

    # -- doing --------------------------------------------------------------------------------------------

    async def _remove(self, places: Mapping[str, QuotaPlace]) -> None:
        context, groups = self._context, self.groups
        if groups is None or not places:
            return
        found, errors = await context.kernel.run(read_quotas, groups, places)
        self._report(errors, self._removing)
        limited = {key: at for key, at in found.items() if at.quota != UNLIMITED}
        for key in found.keys() - limited.keys():
            self._removing.succeeded(key)
        self._not_removed &= limited.keys() | (self.known.records.keys() - found.keys())
        compared_first = self._not_compared & found.keys()
        self._not_compared -= compared_first
        if not limited:
            return
        for key in limited.keys() & self.known.records.keys():
            if key in self._not_removed and limited[key].quota == self.known.records[key].quota:
                continue
            path = f"/{limited[key].group}"
            if key in compared_first or context.state.inflight.is_busy(key.removeprefix(CONTAINER_QUOTA)):
                context.telemetry.event("the CFS quota of a container is not the recorded one", path=path)
                continue
            self._removing.failed(key)
            context.telemetry.count(metrics.CFS_QUOTA_DRIFT)
            context.telemetry.warning("drift: another program wrote a CFS quota", path=path)
        records = {k: at if k.startswith(POD_QUOTA) else QuotaRecord(at.quota) for k, at in limited.items()}
        self._not_removed |= limited.keys()  # the wait may end before they are written
        context.store.handle(engine.QuotasToRemove(records))
        await context.ledger_writer.flush()
        errors = await context.kernel.run(remove_quotas, groups, sorted(limited.items()))
        self._report(errors, self._removing)
        self._not_removed = (self._not_removed - limited.keys()) | {key for key, _ in errors}
        context.telemetry.count(metrics.CFS_QUOTAS_REMOVED, len(limited) - len(errors))
        self.mark_unsent(
            key.removeprefix(CONTAINER_QUOTA) for key in limited if key.startswith(CONTAINER_QUOTA)
        )
        self.restore_soon()  # a container may have exited since

    async def _restore(self) -> None:
        context, groups = self._context, self.groups
        later = frozenset(key for key in self.known.records if not self._restoring.due(key))
        effects = context.store.handle(engine.QuotasToRestore(later))
        send, write = next((e.send, e.write) for e in effects if type(e) is engine.RestoreQuotas)
        self.mark_unsent(send)
        if groups is None or not write:
            return
        # Containers ("qc/") before pods ("q/").
        ordered = sorted(write.items(), reverse=True)
        done, written, errors = await context.kernel.run(restore_quotas, groups, ordered)
        self._report(errors, self._restoring)
        self._not_compared -= done.keys()
        over = tuple(
            key for key, now in done.items() if key.startswith(POD_QUOTA) or now != write[key][0].quota
        )
        context.telemetry.count(metrics.CFS_QUOTAS_RESTORED, written)
        context.store.handle(engine.QuotasRestored(over))

    def _report(self, errors: Iterable[tuple[str, str]], retries: PassRetries) -> None:
        for key, error in errors:
            retries.failed(key)
            self._context.telemetry.problem("cannot write a CFS quota", reason=error)
