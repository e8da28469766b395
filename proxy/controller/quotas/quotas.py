"""CFS quotas of who owns CPUs: off while they own them, and put back afterwards.

Theory. A container whose CPUs are its own needs no quota, and its pod's must not hold it back either. Whether
a quota is off follows from the state alone (``engine.quotas``), so it is asked for anew each time. What was
there before is a *record*: known to the ledger before the quota goes, so that it can be put back whatever
happens to us. There are two kinds:

* pods (``q/`` and the pod's key). Nothing in the CRI names a pod's quota, so it is the kernel's file that is
  written: before the first owner starts, and compared in each pass. A quota that somebody writes there while
  it should be off (kubelet at a resize, systemd at a daemon-reload) is what will be put back, and goes again;
  who insists is repaired ever more rarely.
* containers (``qc/`` and the id). The request that makes or updates a container carries -1; where one runs
  with a quota, its file is written, and the runtime is told (``settle``): else its saved state undoes that.

Order: a pod's quota goes first and a container's comes back first, as cgroup v1 wants it (see
``backends.cgroup.cfs_quota``). A failure costs the feature for that group, and is told.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proxy.controller.context import NodeContext
from proxy.controller.kernel_ports import CpuGroups
from proxy.controller.observer import Observer
from proxy.controller.quotas.files import GroupQuota, look, put_back, take_off
from proxy.engine.quotas import quota_is_off
from proxy.model.backoff import PassRetries
from proxy.model.workload import Container, Phase, Pool
from proxy.pools.quota import UNLIMITED
from proxy.telemetry import metrics

POD, CONTAINER = "q/", "qc/"


@dataclass(frozen=True, slots=True)
class QuotaRecord:
    """What is put back: microseconds; for a pod also the path of its group."""

    quota: int
    group: str = ""


class OwnerQuotas(Observer):
    """Takes quotas off and puts them back.

    Attributes:
        groups: The cpu controller's tree; None where there is none: then nothing is done.
        records: What was there, by the ledger's key.
        untold: Ids of containers whose quota the runtime must still be told.
    """

    def __init__(self, context: NodeContext, groups: CpuGroups | None = None) -> None:
        self._context = context
        self.groups = groups
        self.records: dict[str, QuotaRecord] = {}
        self.untold: set[str] = set()
        self._lock = asyncio.Lock()
        self._taking, self._giving = PassRetries(), PassRetries()
        self._stirred = False

    @property
    def active(self) -> bool:
        """True where quotas are written at all."""
        return self.groups is not None and self._context.store.mode.writes

    def load(self, entries: Mapping[str, Mapping[str, object]]) -> None:
        """Take over what the ledger holds; the first pass compares it."""
        for key, value in entries.items():
            if key.startswith((POD, CONTAINER)):
                quota, group = value.get("quota"), value.get("group", "")
                if isinstance(quota, int) and quota > 0 and isinstance(group, str):
                    self.records[key] = QuotaRecord(quota, group)
                else:
                    self._context.telemetry.problem(
                        "cannot use a record of the ledger", record=key, err="it is not a CFS quota"
                    )

    # -- deciding -----------------------------------------------------------------------------------------

    def off(self, container: Container) -> bool:
        """Tell whether a container's quota is to be off now."""
        if not self.active or self._context.store.mode.is_leaving or container.phase is Phase.EXITED:
            return False
        state = self._context.state
        pod = state.pods.get(container.pod.sandbox_id) or container.pod
        return quota_is_off(state, pod, container.name, container.placement.pool)

    def all_off(self) -> list[Container]:
        """Give the containers whose quota is to be off now."""
        if not self.active:
            return []
        there = self._context.state.containers.values()
        return [c for c in there if c.placement.pool is Pool.OWN and self.off(c)]

    def carried(self, container: Container) -> int:
        """Give the quota that a call to the runtime carries for a container; 0 to leave it."""
        if self.off(container):
            return UNLIMITED
        record = self.records.get(CONTAINER + container.id)
        return record.quota if record is not None and self.active else 0

    # -- what calls tell ----------------------------------------------------------------------------------

    def created(self, token: str, container: Container) -> None:
        """See ``Observer``. Where the request's quota was left out, that is remembered."""
        asked = container.request.cpu_quota
        # Another of its pod may have come since the request went on: then it is put back at once.
        owns = container.placement.pool is Pool.OWN
        if owns and asked > 0 and self.active and (container.placement.cfs_quota_off or self.off(container)):
            self._keep(CONTAINER + container.id, QuotaRecord(asked))
        self.stir()

    def failed(self, token: str) -> None:
        """See ``Observer``."""
        self.stir()

    def entered(self, container: Container, phase: Phase) -> None:
        """See ``Observer``."""
        self.stir()

    def gone(self, container: Container) -> None:
        """See ``Observer``."""
        self.stir()

    def asked(self, container: Container, quota: int) -> int:
        """A client updates a container.

        Args:
            container: Whose resources.
            quota: What the request carries; 0 for none.

        Returns:
            What to put in its place; 0 to leave it.
        """
        key = CONTAINER + container.id
        off = self.off(container)
        if quota > 0 and self.active and (off or key in self.records):
            self._keep(key, QuotaRecord(quota))
        elif quota < 0:
            self._forget(key)
        return UNLIMITED if off else self.carried(container) if quota == 0 else 0

    def told(self, container_id: str, quota: int) -> None:
        """The runtime has taken a quota (0: none was carried)."""
        container = self._context.state.containers.get(container_id)
        if container is not None and quota != self.carried(container):
            return
        self.untold.discard(container_id)
        if quota != UNLIMITED:
            self._forget(CONTAINER + container_id)

    def refused(self, container_id: str) -> None:
        """The runtime would not take it: a write of ours stands, and to tell it again has time."""
        self._giving.failed(CONTAINER + container_id)

    def stir(self) -> None:
        """Something came or went: put back soon what is no longer off."""
        if self.records and self.active and not self._stirred:
            self._stirred = True
            self._context.spawn(self._follow())

    async def _follow(self) -> None:
        self._stirred = False
        async with self._lock:
            await self._put_back(self.all_off())

    async def before_start(self, container: Container) -> None:
        """Take the quota of a container's pod off, where the container is to run without."""
        if not self.off(container):
            return
        try:
            async with asyncio.timeout(self._context.options.call_timeout), self._lock:
                await self._take_off({POD + container.pod.key: (container.pod.cgroup_parent, "")})
        except TimeoutError:
            self._context.telemetry.problem(
                "cannot remove the CFS quota of a pod in time", pod=container.pod.ref
            )

    async def once(self) -> None:
        """Compare all that is off, or was, with the kernel."""
        if not self.active:
            return
        async with self._lock:
            off = self.all_off()
            self._giving.begin_pass(self.records)
            await self._put_back(off)
            places = {POD + c.pod.key: (c.pod.cgroup_parent, "") for c in off}
            running = [c for c in off if c.phase in (Phase.STARTING, Phase.RUNNING)]
            places |= {CONTAINER + c.id: (c.pod.cgroup_parent, c.id) for c in running}
            self._taking.begin_pass(places)
            await self._take_off({key: place for key, place in places.items() if self._taking.due(key)})

    # -- doing --------------------------------------------------------------------------------------------

    async def _take_off(self, places: Mapping[str, tuple[str, str]]) -> None:
        context, groups = self._context, self.groups
        shared = self._shared_parents()
        places = {k: v for k, v in places.items() if v[1] or v[0] not in shared}
        if groups is None or not places:
            return
        found, errors = await context.kernel.run(look, groups, places)
        self._complain(errors, self._taking)
        limited = {key: at for key, at in found.items() if at.quota != UNLIMITED}
        for key in found.keys() - limited.keys():
            self._taking.succeeded(key)
        if not limited:
            return
        for key, at in limited.items():
            if key in self.records:
                self._taking.failed(key)
                context.telemetry.count(metrics.CFS_QUOTA_DRIFT)
                context.telemetry.warning("drift: another program wrote a CFS quota", path=f"/{at.path}")
            self._keep(key, QuotaRecord(at.quota, at.path if key.startswith(POD) else ""))
        await context.journal.flush()
        errors = await context.kernel.run(take_off, groups, sorted(limited.items()))
        self._complain(errors, self._taking)
        context.telemetry.count(metrics.CFS_QUOTAS_REMOVED, len(limited) - len(errors))
        self._tell(key.removeprefix(CONTAINER) for key in limited if key.startswith(CONTAINER))
        self.stir()  # somebody may have ended meanwhile

    async def _put_back(self, off: list[Container]) -> None:
        groups, containers = self.groups, self._context.state.containers
        live = {POD + c.pod.key for c in off} | {CONTAINER + c.id for c in off}
        back: dict[str, tuple[GroupQuota, tuple[str, str]]] = {}
        for key, record in list(self.records.items()):
            if key in live or not self._giving.due(key):
                continue
            if key.startswith(POD):
                back[key] = GroupQuota(record.group, record.quota), ("", "")
                continue
            container = containers.get(key.removeprefix(CONTAINER))
            if container is None or container.phase is Phase.EXITED:
                self._forget(key)
                continue
            self._tell((container.id,))
            if container.phase is not Phase.CREATED:
                back[key] = GroupQuota("", record.quota), (container.pod.cgroup_parent, container.id)
        if groups is None or not back:
            return
        # Containers ("qc/") before pods ("q/").
        done, errors = await self._context.kernel.run(put_back, groups, sorted(back.items(), reverse=True))
        self._complain(errors, self._giving)
        for key, now in done.items():
            if key.startswith(POD) or now != back[key][0].quota:
                self._context.telemetry.count(metrics.CFS_QUOTAS_RESTORED, key.startswith(POD))
                self._forget(key)

    def _shared_parents(self) -> set[str]:
        """Give the parents that several pods name: these groups are nobody's own."""
        users: defaultdict[str, set[str]] = defaultdict(set)
        for pod in self._context.state.pods.values():
            users[pod.cgroup_parent].add(pod.key)
        return {parent for parent, keys in users.items() if len(keys) > 1}

    def _tell(self, ids: Iterable[str]) -> None:
        for container_id in ids:
            self.untold.add(container_id)
            self._context.unsettled[container_id] = None
            self._context.to_settle.set()

    def _keep(self, key: str, record: QuotaRecord) -> None:
        if self.records.get(key) != record:
            self.records[key] = record
            self._context.journal.put(key, {"quota": record.quota, "group": record.group})

    def _forget(self, key: str) -> None:
        self.untold.discard(key.removeprefix(CONTAINER))
        if self.records.pop(key, None) is not None:
            self._context.journal.put(key, None)

    def _complain(self, errors: Iterable[tuple[str, str]], retries: PassRetries) -> None:
        for key, error in errors:
            retries.failed(key)
            self._context.telemetry.problem("cannot write a CFS quota", reason=error)
