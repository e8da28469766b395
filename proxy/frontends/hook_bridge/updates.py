"""Apply the updates that hooks request for other containers, independently of held calls.

At most ``MOST_CONTAINERS`` containers wait; for each field only the newest value is kept. At most
``UPDATES_PER_SECOND`` updates are applied per second. CPUs narrow the container's placement, and the kernel's
cpuset follows as when pools change. The other fields are sent in one UpdateContainerResources of our own,
which carries the container's CPUs as all our updates do. While a call for the container is at the runtime,
its updates wait: otherwise it would be unknown which of the two was the last one, which is in effect.

There are no answers: updates that are impossible are reported in ``problems``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from proxy.engine.call_events import UpdateRequested
from proxy.engine.enforcement import applies_to
from proxy.engine.hook_narrowing import Narrowing
from proxy.engine.memory_resize import added_nodes
from proxy.engine.quotas import quota_record
from proxy.executor.background import Worker
from proxy.executor.runtime_ports import Limits
from proxy.frontends.hook_bridge.facts import decision_of
from proxy.hooks.answers import CLEAR, LEAVE, Update
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics
from proxy.telemetry.port import subject_of

if TYPE_CHECKING:
    from proxy.executor.node_executor import NodeExecutor

MOST_CONTAINERS: Final = 256
"""This many containers may have waiting updates."""
UPDATES_PER_SECOND: Final = 50
UPDATE_TIMEOUT_S: Final = 10.0
"""How long an update waits for calls at the runtime, and for a runtime that does not answer."""
_LIMITS: Final = Limits.__struct_fields__[:-1]
"""All fields except ``unified``."""

_NOT_REQUESTED: Final = {"cpu_period": 100_000, "cpu_quota": -1, "cpu_shares": 1024, "oom_score_adj": 0}
"""The values of a container if nothing was requested; for memory no limit (-1)."""


@dataclass(slots=True)
class _PendingUpdate:
    """The updates that wait for one container.

    Attributes:
        since: The time of the last request.
        fields: Field to value.
        unified: Files of cgroup v2.
        hook_by_field: Field to hook.
    """

    since: float
    fields: dict[str, Any] = field(default_factory=dict)
    unified: dict[str, str] = field(default_factory=dict)
    hook_by_field: dict[str, str] = field(default_factory=dict)

    def add(self, update: Update, hook_by_field: Mapping[str, str], now: float) -> None:
        """Let newer requests override older ones."""
        self.since = now
        for name in ("cpus", *_LIMITS):
            if (value := getattr(update, name)) is not LEAVE:
                self.fields[name] = value
        self.unified.update(update.unified)
        self.hook_by_field.update(hook_by_field)


def _values(pending: _PendingUpdate) -> dict[str, Any]:
    return {n: _NOT_REQUESTED.get(n, -1) if v is CLEAR else v for n, v in pending.fields.items()}


class HookUpdates:
    """Applies the updates that hooks request for containers."""

    def __init__(self, executor: NodeExecutor, *, owned_cpus: bool = False) -> None:
        """Wait for updates.

        Args:
            executor: The node.
            owned_cpus: Hooks may assign CPUs that have owners.
        """
        self._executor = executor
        self._owned_cpus = owned_cpus
        self._worker = Worker("hook-updates", executor.report_internal_error)
        self._waiting: dict[str, _PendingUpdate] = {}
        self._is_running = False

    def queue(self, updates: Mapping[str, Update], owners: Mapping[str, str]) -> None:
        """Queue the updates that hooks request.

        Args:
            updates: Container's id to its update.
            owners: Field (``updates[id].cpus``) to the hook that has set it.
        """
        now = self._executor.clock()
        for container_id, update in updates.items():
            prefix = f"updates[{container_id}]."
            hook_by_field = {
                name.removeprefix(prefix): hook for name, hook in owners.items() if name.startswith(prefix)
            }
            pending = self._waiting.get(container_id)
            if pending is None:
                pending = _PendingUpdate(now)
                if self._find(container_id, hook_by_field) is None:
                    continue
                if len(self._waiting) >= MOST_CONTAINERS:
                    self._report_not_applied(container_id, hook_by_field, "too many updates wait")
                    continue
                self._waiting[container_id] = pending
            pending.add(update, hook_by_field, now)
        if self._waiting and not self._is_running:
            self._is_running = True
            self._executor.spawn(self._carry_out())

    async def _carry_out(self) -> None:
        try:
            while self._waiting:
                container_id = next(iter(self._waiting))
                pending = self._waiting.pop(container_id)
                try:
                    again = await self._apply_to_container(container_id, pending)
                except Exception as error:  # noqa: BLE001  one failing container must not stop the others
                    self._executor.report_internal_error(error)
                    again = False
                if again:
                    self._put_back(container_id, pending)
                await asyncio.sleep(1 / UPDATES_PER_SECOND)
        finally:
            self._is_running = False

    def _put_back(self, container_id: str, pending: _PendingUpdate) -> None:
        """Queue the container again, behind the others; requests that came in the meantime are newer."""
        newer = self._waiting.pop(container_id, None)
        if newer is not None:
            pending.since = newer.since
            pending.fields |= newer.fields
            pending.unified |= newer.unified
            pending.hook_by_field |= newer.hook_by_field
        self._waiting[container_id] = pending

    async def _apply_to_container(self, container_id: str, pending: _PendingUpdate) -> bool:
        """Apply the updates of one container; return whether they have to wait longer."""
        executor = self._executor
        if (container := self._find(container_id, pending.hook_by_field)) is None:
            return False
        if not applies_to(executor.state, container.pod):
            return False
        cpus = pending.fields.pop("cpus", LEAVE)
        if cpus is not LEAVE:
            self._narrow(container, cpus, pending.hook_by_field["cpus"])
        if not pending.fields and not pending.unified:
            return False
        late = executor.clock() - pending.since > UPDATE_TIMEOUT_S
        if executor.state.inflight.of(container_id):
            if late:
                self._report_not_applied(
                    container_id, pending.hook_by_field, "the runtime is still busy with it"
                )
            return not late
        try:
            await self._send(container_id, pending)
        except UnavailableError as error:
            if late:
                self._report_not_applied(container_id, pending.hook_by_field, str(error))
            else:
                await asyncio.sleep(1.0)
            return not late
        except RuntimeCallError as error:
            self._report_not_applied(container_id, pending.hook_by_field, str(error))
        return False

    def _narrow(self, container: Container, cpus: Any, hook: str) -> None:
        executor = self._executor
        if cpus is not CLEAR:
            outside = cpus - decision_of(executor.state, container, self._owned_cpus).allowed
            if outside:
                has = "may have" if self._owned_cpus else "has"
                self._report_not_applied(
                    container.id, {"cpus": hook}, f"CPUs {outside} are not among those it {has}"
                )
                return
        narrowing = Narrowing(
            None if cpus is CLEAR else cpus, None, cpus is CLEAR, hook, owned=self._owned_cpus
        )
        if problem := executor.overrides.narrow(container.id, narrowing):
            executor.telemetry.problem("cannot narrow a container as hooks request", reason=problem)

    async def _send(self, container_id: str, pending: _PendingUpdate) -> None:
        """Send a container's updates to the runtime.

        Raises:
            UnavailableError, RuntimeCallError: The runtime does not accept them.
        """
        executor = self._executor
        fencing = executor.unit_properties.fencing
        fence = await fencing.fitting(container_id)
        container = executor.state.containers.get(container_id)
        if container is None or container.phase is Phase.EXITED or executor.state.inflight.of(container_id):
            await fencing.remove(fence)
            raise UnavailableError("it is being changed, or has ended")
        if not applies_to(executor.state, container.pod):  # its pod was released while the fence was written
            await fencing.remove(fence)
            raise UnavailableError("the plan is not applied to its pod any more")
        want, values = executor.state.desired_cpus(container), _values(pending)
        quota, former_quota = values.pop("cpu_quota", 0), quota_record(executor.state, container_id)
        # A quota that is off stays off; the value requested now is the one that will be restored.
        carried = executor.quotas.requested_by_hook(container, quota) or quota
        limits = Limits(cpu_quota=carried, unified=pending.unified, **values)
        cpus: CpuSet | None = None if executor.state.node.erases(container.placement) else want
        call = executor.inflight_calls.track(container_id, want)
        fencing.bind(call, fence)
        update, is_refused = executor.quotas.update_sent(container_id, quota, former_quota), False
        async with executor.call_tracker.under_way(call):
            mems = executor.mems.renewed(container)
            if added := added_nodes(executor.state, container, limits.memory_limit):
                mems = executor.mems.carried(container) | added
            try:
                await self._worker.run(executor.runtime.update_limits, container_id, cpus, mems, limits)
            except RuntimeCallError:
                is_refused = True
                raise
            finally:
                executor.quotas.update_ended(update, refused=is_refused)
            executor.call_tracker.accepted(UpdateRequested(container_id, "", "", quota, limits.memory_limit))
            executor.telemetry.count(metrics.UPDATED_BY_HOOKS)

    # -- containers and problems --------------------------------------------------------------------------

    def _find(self, container_id: str, hook_by_field: Mapping[str, str]) -> Container | None:
        container = self._executor.state.containers.get(container_id)
        if container is None or container.phase in (Phase.CREATING, Phase.EXITED):
            self._report_not_applied(
                container_id,
                hook_by_field,
                "there is no such container" if container is None else "it does not run",
            )
            return None
        return container

    def _report_not_applied(self, container_id: str, hook_by_field: Mapping[str, str], error: str) -> None:
        which = subject_of(self._executor.state.containers, container_id)
        hooks = ", ".join(sorted(set(hook_by_field.values())))
        self._executor.telemetry.count(metrics.UPDATES_BY_HOOKS_FAILED)
        self._executor.telemetry.problem(
            "cannot update a container as hooks request", **which, hook=hooks, err=error
        )

    def close(self) -> None:
        """End the worker."""
        self._worker.close()
