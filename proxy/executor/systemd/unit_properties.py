"""Makes cpusets last if containers are systemd scopes (cgroup v2).

Theory of operation.

* A value in a cgroup file lasts until systemd writes the file: from the unit's properties, at a daemon-reload
  and at any change of any property. So a cpuset that was written to the kernel is also set as the unit's
  ``AllowedCPUs`` (and ``AllowedMemoryNodes``, as the kernel has them), in the background and at a limited
  rate.
* The runtime sends cpusets to systemd as well: runc does at each start and update. runc before 1.1.6 sends
  the bytes of a mask in the wrong order, so that the unit gets another cpuset: the first eight CPUs change
  places with the last, and a container that shares CPUs may be put on an owner's. So the unit's properties
  are read after each call that carried a cpuset (``engine.systemd_masks``). A runtime that sends wrong
  cpusets is reported once, and each unit is repaired at once. A cpuset that is the same in both orders proves
  nothing and does no harm.
* Between such a call and the repair, the wrong cpuset may be in effect. Unless the runtime is known to send
  right ones, the pod is fenced for that time (``fencing``), and the call counts as in flight until the unit
  is right. Once the runtime is known to send wrong ones, topoproxy sends its changes to systemd only.
* Setting a property writes the file, too. So it counts as in flight like any other call that carries a
  cpuset, and a shrink waits for it.
* Slices above may have cpusets as well. If the kernel's list of a slice had to be widened for a container,
  the property of the slice follows, so that the container's cpuset stays within it after a reload.

When systemd has reloaded its units, all containers are compared with the kernel at once (``drift``).
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterable

from proxy.engine.enforcement import applies_to
from proxy.engine.inflight import InflightCall
from proxy.engine.likely_writer import WriterKind
from proxy.engine.node_effects import CompareUnits
from proxy.engine.runtime_sync_step import is_transient
from proxy.engine.systemd_masks import MaskOrder, ReportReversedMask, UnitCpusRead
from proxy.executor.background import Worker
from proxy.executor.context import NodeContext
from proxy.executor.kernel_writes import KernelWrites
from proxy.executor.systemd.fencing import Fencing
from proxy.executor.systemd.ports import Fences, SystemdEvent, Units, UnitSets
from proxy.model.errors import CgroupError, UnavailableError
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics

PER_SECOND = 50.0
"""How many units are set a second in the background; each costs systemd a small file."""
READ_WEIGHT = 0.2
"""The cost of comparing a unit that is right, as a fraction of the cost of setting one."""
AWAY_S = 1.0


class UnitProperties:
    """Makes cpusets last as properties of units.

    Attributes:
        units: The units of systemd; None if there is no systemd.
        fencing: The fences around pods.
        connected: Whether systemd can be queried now.
    """

    def __init__(
        self,
        context: NodeContext,
        writes: KernelWrites,
        compare_soon: Callable[[str], None],
        units: Units | None = None,
        fences: Fences | None = None,
    ) -> None:
        """Compare nothing yet.

        Args:
            context: Has the containers.
            writes: Makes the kernel follow the state, and reports what was written.
            compare_soon: Has all containers compared; takes the name of the program that may have written.
            units: The units of systemd; None if there is no systemd.
            fences: Narrows groups above containers; None if nothing can.
        """
        self._context = context
        self._writes = writes
        self._compare_soon = compare_soon
        self._worker = Worker("units", context.report_internal_error, threads=2)
        context.health.watch(self._worker)
        self._loop = asyncio.get_running_loop()
        self.units = units
        self.fencing = Fencing(context, writes, self, fences)
        writes.subscribe(lambda done: self.changed(done.written))
        self.connected = False
        self._as_sent = context.options.quirks.mask_as_sent
        self._is_watching = False
        self._known: dict[str, CpuSet] = {}
        self._carried: dict[str, CpuSet] = {}
        """What the last call has sent to systemd for each container, until something else sets its unit."""
        self._dirty: dict[str, None] = {}
        self._put_off: set[str] = set()
        self._late: list[InflightCall] = []
        """Changes that were sent to systemd and that it has not answered."""
        self._late_unit = ""
        """The unit of the last of these changes."""
        context.store.perform_by(CompareUnits, lambda effect: self.changed(effect.ids))
        context.store.perform_by(ReportReversedMask, self._report_reversed)
        self._wake = asyncio.Event()

    @property
    def order(self) -> MaskOrder:
        """The byte order in which the runtime sends masks to systemd."""
        return self._context.state.facts.masks

    # -- what systemd reports -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Connect, once there is a unit."""
        if not self._is_watching and self.units is not None:
            self._is_watching = True
            self.units.watch(self._unit_event)

    def _unit_event(self, event: SystemdEvent) -> None:
        """Pass a notification on to the event loop; called in a thread of ``units``."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._process_unit_event, event)

    def _process_unit_event(self, event: SystemdEvent) -> None:
        context = self._context
        if event is SystemdEvent.LOST:
            self.connected = False
            return
        if event is SystemdEvent.CONNECTED:
            context.telemetry.count(metrics.SYSTEMD_CONNECTIONS)
            self.connected = True
            self.changed(context.state.containers)
            self._wake.set()
            if context.telemetry.value(metrics.SYSTEMD_CONNECTIONS) == 1:
                return
        else:
            context.telemetry.count(metrics.SYSTEMD_RELOADS)
        self._compare_soon(WriterKind.SYSTEMD)

    # -- what the runtime sends to systemd ----------------------------------------------------------------

    def bypasses_runtime(self, container: Container) -> bool:
        """Return whether a container's cpuset is sent to systemd only, as the runtime sends wrong ones."""
        return self.order is MaskOrder.REVERSED and self.connected and self.is_unit(container)

    def is_trusted(self, cpus: CpuSet) -> bool:
        """Return whether a cpuset that the runtime sends to systemd is known to arrive unchanged."""
        return self.order is MaskOrder.CORRECT or self._as_sent(cpus) == cpus

    def sent(self, container_id: str, carried: CpuSet, *, alone: bool) -> None:
        """Record that the runtime has sent a cpuset to systemd, outside of a fence.

        Args:
            container_id: The container.
            carried: The cpuset.
            alone: Whether no other call for the container was in flight at the same time.
        """
        self._carried.pop(container_id, None)
        container = self._context.state.containers.get(container_id)
        if alone and container is not None and self.is_unit(container):
            self._carried[container_id] = carried
        if not self.is_trusted(carried) or self._known.get(container_id) != carried:
            self.changed([container_id])

    def completed(self, container_id: str) -> None:
        """Record that a call has completed, with any result: compare the units that waited for it."""
        if container_id in self._put_off:
            self._put_off.discard(container_id)
            self.changed([container_id])

    def _report_reversed(self, effect: ReportReversedMask) -> None:
        self._context.telemetry.count(metrics.SYSTEMD_UNITS_REPAIRED)
        if effect.is_new:
            self._context.telemetry.problem(
                "the runtime sends wrong CPUs to systemd, as runc before 1.1.6 does: they are corrected after"
                " each start and update",
                cpus=effect.unit.planned,
                found=effect.unit.has,
            )

    # -- in the background --------------------------------------------------------------------------------

    def is_unit(self, container: Container) -> bool:
        """Return whether a container is a systemd scope, or will be one."""
        context = self._context
        if self.units is None or context.cpuset_writer.cgroups.version != 2:
            return False
        if not applies_to(context.state, container.pod):
            return False
        parent, path = container.pod.cgroup_parent, context.cpuset_writer.known_path(container) or ""
        erased = context.state.node.erases(container.placement)  # it has what its pod's slice has
        is_one = path.endswith(".scope") if path else parent.rstrip("/").endswith(".slice")
        return is_one and not erased

    def changed(self, ids: Iterable[str]) -> None:
        """Request a comparison of the units of some containers soon."""
        if self.units is None or self._context.cpuset_writer.cgroups.version != 2:
            return
        containers = self._context.state.containers
        units = [c.id for c in self._context.state.existing(ids) if self.is_unit(c)]
        if units:
            self.begin()
            self._known = {i: cpus for i, cpus in self._known.items() if i in containers}
            self._carried = {i: cpus for i, cpus in self._carried.items() if i in containers}
            # The ids are kept as long as systemd is not connected.
            self._dirty = {i: None for i in self._dirty if i in containers}
            self._dirty.update(dict.fromkeys(units))
            self._wake.set()

    async def run(self) -> None:
        """Compare the units that are due, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (self._dirty or self._late) and self.connected:
                if self._late and not await self._complete_late():
                    await asyncio.sleep(AWAY_S)
                    continue
                if not self._dirty:
                    break
                container_id = next(iter(self._dirty))
                del self._dirty[container_id]
                try:
                    was_set = await self._compare(container_id)
                    await asyncio.sleep((1 if was_set else READ_WEIGHT) / PER_SECOND)
                except CgroupError as error:
                    self.failed(container_id, error)
                except UnavailableError as error:
                    self.failed(container_id, error)
                    await asyncio.sleep(AWAY_S)
                except Exception as error:  # noqa: BLE001  one odd unit must not stop the others
                    self._context.report_internal_error(error)

    async def _complete_late(self) -> bool:
        """Complete unanswered changes, whatever has become of their containers; False without an answer."""
        assert self.units is not None
        try:
            await self._worker.run(self.units.read, self._late_unit)
        except CgroupError:
            pass  # an error is an answer, too: the unit may be gone
        except UnavailableError:
            return False
        except Exception as error:  # noqa: BLE001  the other units must still be compared
            self._context.report_internal_error(error)
            return False
        self._caught_up()
        return True

    def failed(self, container_id: str, error: CgroupError | UnavailableError) -> None:
        """Handle that a unit could not be read or set."""
        if isinstance(error, UnavailableError):
            self._dirty[container_id] = None
            self._wake.set()
        elif error.errno == errno.ENOENT:
            return  # it has ended
        self._context.telemetry.problem("cannot set the properties of a systemd unit", err=error)

    async def _compare(self, container_id: str) -> bool:
        """Compare one unit; True if it was set."""
        context = self._context
        container = context.state.containers.get(container_id)
        if any(call not in self._late for call in context.state.inflight.of(container_id)):
            self._put_off.add(container_id)  # until the call has completed: a start makes the container run
            return False
        if container is None or container.phase is not Phase.RUNNING or not self.is_unit(container):
            return False
        path = await context.kernel.run(context.cpuset_writer.path_of, container)
        if path is None or not path.endswith(".scope"):
            return False
        return await self.repair(container_id, path, carried=self._carried.pop(container_id, None))

    async def repair(
        self,
        container_id: str,
        path: str,
        inflight_call: InflightCall | None = None,
        carried: CpuSet | None = None,
    ) -> bool:
        """Correct a unit's properties to what its container should have.

        Args:
            container_id: The container.
            path: Its group.
            inflight_call: The call at the runtime that this follows, and that still counts as in flight.
            carried: The cpuset that the runtime has just sent to systemd, if any.

        Returns:
            Whether the properties were set.

        Raises:
            CgroupError, UnavailableError: systemd refuses, or is not available.
        """
        context = self._context
        has, nodes = await self._worker.run(self._read, path)
        self._caught_up()
        container = context.state.containers.get(container_id)
        if (
            container is None
            or container.phase is Phase.EXITED
            or not applies_to(context.state, container.pod)
        ):
            self._known.pop(container_id, None)
            return False
        want = context.state.desired_cpus(container)
        # If a call of topoproxy was in flight too, the properties read may be those of that call.
        call = inflight_call and (context.state.inflight.current(inflight_call) or inflight_call)
        alone = call is None or not call.overlapped
        meant, sent = carried or want, carried is not None and alone
        context.store.handle(UnitCpusRead(has.cpus, meant, self._as_sent(meant), sent))
        self._known[container_id] = has.cpus
        cpus = None if has.cpus == want or is_transient(context.state, container, has.cpus) else want
        mems = nodes if nodes != has.mems else None
        if cpus is None and not mems:
            return False
        # A create that needs CPUs that this call gives to the container waits for the call.
        own = (
            None
            if inflight_call is not None and want <= inflight_call.carries
            else context.inflight_calls.track(container_id, want)
        )
        self._carried.pop(container_id, None)
        try:
            await self._worker.run(self._set, path, cpus, mems or None)
            self._known[container_id] = want if cpus else has.cpus
            context.telemetry.count(metrics.SYSTEMD_UNITS_SET)
        except UnavailableError:  # it may still be done: a reload can take longer than the deadline
            self._late.append(own or context.inflight_calls.track(container_id, want))
            self._late_unit = path.rpartition("/")[2]
            self._wake.set()
            own = None
            raise
        finally:
            if own is not None:
                context.inflight_calls.complete(own)
                self._writes.write_soon([container_id])
        return True

    def _caught_up(self) -> None:
        """Complete unanswered changes: systemd works in order, so a later answer shows that they are done."""
        late, self._late = self._late, []
        for call in late:
            self._context.inflight_calls.complete(call)
            self._writes.write_soon([call.container_id])

    # -- in the worker ------------------------------------------------------------------------------------

    def _read(self, path: str) -> tuple[UnitSets, Mask]:
        """Read the properties of a unit, and the memory nodes that the kernel has for it."""
        assert self.units is not None
        return self.units.read(path.rpartition("/")[2]), self._context.cpuset_writer.cgroups.memory_nodes(
            path
        )

    def _set(self, path: str, cpus: CpuSet | None, mems: Mask | None) -> None:
        assert self.units is not None
        *above, unit = path.split("/")
        self.units.set(unit, cpus, mems)
        for depth, name in enumerate(above, 1):
            if cpus is None or not name.endswith(".slice"):
                continue
            has = self.units.read(name).cpus
            held = self._context.cpuset_writer.cgroups.read("/".join(above[:depth])).cpus
            if has and not cpus <= has and cpus <= held:
                self.units.set(name, has | cpus, None)
                self._context.telemetry.problem("widened a systemd slice", unit=name, cpus=cpus, found=has)

    async def set_for_release(self, container_id: str, cpus: CpuSet, mems: Mask) -> None:
        """Set a unit's properties to what its container gets back at a release; failures are reported."""
        context = self._context
        container = context.state.containers.get(container_id)
        if container is None or not self.connected or context.cpuset_writer.cgroups.version != 2:
            return
        path = await context.kernel.run(context.cpuset_writer.path_of, container)
        if path is None or not path.endswith(".scope"):
            return
        self._carried.pop(container_id, None)
        try:
            await self._worker.run(self._set, path, cpus, mems)
        except (CgroupError, UnavailableError) as error:
            self.failed(container_id, error)

    # -- status page, and the end -------------------------------------------------------------------------

    def page(self) -> dict[str, object]:
        """Return what ``topoproxy status`` shows; empty if there are no units."""
        if not self._is_watching:
            return {}
        due = len(self._dirty)
        return {"systemd": {"connected": self.connected, "runtime_tells": str(self.order), "due": due}}

    async def close(self, *, fences_stay: bool = False) -> None:
        """Remove fences, unless they must stay, and disconnect."""
        if not fences_stay:
            await self.fencing.remove_all()
        if self.units is not None:
            await asyncio.to_thread(self.units.close)
        await asyncio.to_thread(self._worker.close)
