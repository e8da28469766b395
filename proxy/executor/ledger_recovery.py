"""Reads the ledger when the daemon starts: its records of pods, containers and CPUs go into the state.

The records are of an earlier process, and perhaps of an earlier version: a record that cannot be used is
reported and left, since the first reconcile compares everything with the runtime and the kernel
(``reconciler``). The ledger is read in steps, so that the event loop runs other tasks in between on a node
with many containers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from proxy.engine.enforcement import applies_to
from proxy.engine.enforcement_state import APPLIED_TO_ALL, ENFORCEMENT_RECORD, Enforcement
from proxy.engine.held_devices import (
    DEVICE_RESOURCE_RECORD,
    POD_DEVICES_RECORD,
    PodDevices,
    load_record,
    salvaged,
)
from proxy.engine.node_events import EnforcementRead, LedgerRead
from proxy.engine.node_state_facts import BE_GROUPS
from proxy.executor.call_tracker import CallTracker, report_overcommitted_memory
from proxy.executor.context import NodeContext
from proxy.executor.kernel_writes import CgroupLocator
from proxy.executor.ledger_codec import load_container, load_pod
from proxy.executor.owner_moves import OwnerMoves
from proxy.executor.quotas import OwnerQuotas
from proxy.model.explanation import RESTORED
from proxy.model.mode import NodeMode
from proxy.model.workload import CONTAINER_RECORD, CREATE_RECORD, POD_RECORD, Container, Pod

if TYPE_CHECKING:
    from proxy.executor.partitions.sync import PartitionSync

UNREADABLE = "it cannot be read, and is rebuilt from the runtime"
ANSWER_LOST = (
    "its containers keep their devices, but what the device plugins answered is lost: recreate the pod"
)
LOST = "devices in it cannot be read, and may be given to other containers: recreate the pod"


class LedgerRecovery:
    """Brings the state to where the last daemon left it."""

    def __init__(
        self,
        context: NodeContext,
        call_tracker: CallTracker,
        quotas: OwnerQuotas,
        owner_moves: OwnerMoves,
        cgroup_locator: CgroupLocator,
        partitions: PartitionSync | None,
        *,
        has_devices: bool,
    ) -> None:
        """Prepare; nothing is read yet.

        Args:
            context: The node.
            call_tracker: Expects starts that an earlier daemon has sent.
            quotas: Takes the records of CFS quotas.
            owner_moves: Takes the records of moves.
            cgroup_locator: Takes what was known of cgroups.
            partitions: Takes the records of partitions; None if there are none.
            has_devices: Whether there are device plugins, so that their records are read.
        """
        self._context = context
        self._call_tracker = call_tracker
        self._quotas = quotas
        self._owner_moves = owner_moves
        self._cgroup_locator = cgroup_locator
        self._partitions = partitions
        self._has_devices = has_devices

    def recover(self, entries: Mapping[str, Mapping[str, object]]) -> None:
        """Load the ledger's records; the first reconcile compares them with the runtime and kernel."""
        for _ in self.recovering(entries):
            pass

    def recovering(self, entries: Mapping[str, Mapping[str, object]]) -> Iterator[None]:
        """Do what ``recover`` does, in steps; the executor must not be used before the last step."""
        context = self._context
        self._quotas.load(entries)
        if self._partitions is not None:
            self._partitions.load(entries)
        pods, containers, lost = list[Pod](), list[Container](), list[str]()
        yield from self._recorded(entries, pods, containers, lost)
        holds = self._owner_moves.recover(entries, containers)
        devices, resources = self._recorded_devices(entries)
        arriving = self._call_tracker.former_calls.sandboxes
        read = LedgerRead(
            tuple(pods),
            tuple(containers),
            holds,
            tuple(lost),
            context.clock(),
            devices,
            resources,
            arriving,
            be_groups=BE_GROUPS in entries,
        )
        context.store.handle(read)
        self._recall_enforcement(entries.get(ENFORCEMENT_RECORD))
        yield
        yield from self._call_tracker.register_suspected_calls()
        report_overcommitted_memory(context)
        for container in context.state.containers.values():
            cpus, applied = context.state.desired_cpus(container), applies_to(context.state, container.pod)
            now = context.wall_clock()
            context.history.note_without_explanation(now, container, cpus, applied=applied, event=RESTORED)
            yield
        self._cgroup_locator.remember_recorded_paths()

    def _recorded_devices(
        self, entries: Mapping[str, Mapping[str, object]]
    ) -> tuple[dict[str, PodDevices], tuple[str, ...]]:
        """Return the devices that pods held, and the resources that were registered."""
        found, resources = dict[str, PodDevices](), list[str]()
        if not self._has_devices:
            return found, ()  # without device plugins nothing could use them
        for key, value in entries.items():
            if key.startswith(DEVICE_RESOURCE_RECORD):
                resources.append(key.removeprefix(DEVICE_RESOURCE_RECORD))
            elif key.startswith(POD_DEVICES_RECORD):
                try:
                    found[key.removeprefix(POD_DEVICES_RECORD)] = load_record(value)
                except ValueError:
                    found[key.removeprefix(POD_DEVICES_RECORD)], whole = salvaged(value)
                    self._context.telemetry.problem(
                        "cannot use a record of the ledger", record=key, err=ANSWER_LOST if whole else LOST
                    )
        return found, tuple(resources)

    def _recall_enforcement(self, record: Mapping[str, object] | None) -> None:
        """Continue applying the plan from the point where the last daemon ended."""
        context, known = self._context, (NodeMode.ENFORCE, APPLIED_TO_ALL)
        if record is not None:
            try:
                known = Enforcement.load(record)
            except ValueError as error:
                context.telemetry.problem(
                    "cannot use a record of the ledger", record=ENFORCEMENT_RECORD, err=str(error)
                )
                known = context.state.mode, context.state.enforcement
        context.store.handle(EnforcementRead(*known))
        context.enforcement_step_due.set()

    def _recorded(
        self,
        entries: Mapping[str, Mapping[str, object]],
        pods: list[Pod],
        containers: list[Container],
        lost: list[str],
    ) -> Iterator[None]:
        """Read the ledger's records into lists, in steps, and report those that cannot be used."""
        context, bounds = self._context, self._context.state.node.machine.bounds
        for key, value in entries.items():
            yield
            if key.startswith(POD_RECORD):
                if (pod := load_pod(value, bounds)) is not None:
                    context.bad_input.report_defects(pod)
                    pods.append(pod)
                    continue
            elif key.startswith((CONTAINER_RECORD, CREATE_RECORD)):
                if (container := load_container(value, bounds)) is not None:
                    containers.append(container)
                    if key.startswith(CREATE_RECORD):
                        lost.append(container.id)
                    continue
            else:
                continue
            context.telemetry.problem("cannot use a record of the ledger", record=key, err=UNREADABLE)
