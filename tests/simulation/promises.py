"""The promises of docs/applying.md, checked while a simulated node runs.

What is checked when:

- each write of a cpuset: it is not empty; no container that shares CPUs is on those of an owner that runs,
  and no CPU has two owners (only groups that were written by the daemon or the runtime last: what another
  program does is repaired, and that is checked when the node is calm);
- each create that is forwarded with CPUs of its own: its record is in the ledger;
- each call: it is decided in time, and not by a daemon that was replaced;
- each start of a daemon: the ledger holds every record that was written; each reconcile afterwards: no owner
  has lost its CPUs;
- the end of a release: every container has in the kernel and at the runtime what it would have without the
  daemon, which writes no cpuset from then on;
- often: no exception escapes in the daemon; now and then: the invariants of the state;
- when the node is calm (``calm_node_checks.py``): the kernel, the runtime, the ledger and the state agree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.api.cri import api_pb2 as pb
from proxy.calls.hook_gateway import END_POINTS
from proxy.engine.invariants import violations
from proxy.model.idset import union
from proxy.model.kubelet import CpuManager
from proxy.model.mode import NodeMode
from proxy.model.workload import Container, Pool
from proxy.release.kernel import target_of
from proxy.release.on_demand import RELEASE_RECORD
from tests.simulation.kernel import bits_of, text_of
from tests.simulation.runtime import CREATED, EXITED

if TYPE_CHECKING:
    from tests.simulation.kernel import SimulatedGroup
    from tests.simulation.kubelet import KubeletCall
    from tests.simulation.node import SimulatedNode
    from tests.simulation.runtime import SimulatedContainer


class ViolationError(AssertionError):
    """A promise is broken."""


@dataclass(slots=True)
class Role:
    """The CPUs of a container, as the daemon reported them when it let the container start.

    Attributes:
        pool: Where its CPUs come from.
        owner: The owner of its CPUs; empty for none.
        excludes_be: Whether BE containers must stay off its CPUs.
        exclusive_sets: The exclusive CPUs; more than one value while a move is under way.
        mover: The daemon that has moved it last.
        replacement: CPUs that stand in for those that are offline.
    """

    pool: Pool
    owner: str
    excludes_be: bool
    exclusive_sets: set[int] = field(default_factory=set)
    replacement: int = 0
    mover: object = None


def _role(container: Container) -> Role:
    placement = container.placement
    owns = placement.pool is Pool.OWN
    return Role(
        placement.pool,
        container.owner if owns else "",
        placement.excludes_be,
        {placement.exclusive.bits} if owns else set(),
    )


class Promises:
    """Checks the promises of docs/applying.md on a node.

    Attributes:
        violation: The first promise that was found broken; empty for none.
        suspended: The node is released, or is not in step yet since: nothing is placed.
        durable: What the ledger holds, by key.
        checks: How many checks were made.
    """

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.suspended = False
        self.violation = ""
        self.durable: dict[str, object] = {}
        self.disk_works = True
        self._moving = frozenset[str]()
        self.checks = 0
        self.roles: dict[str, Role] = {}
        self._chosen: dict[str, int] = {}
        self._creates: dict[tuple[str, str, int], Role] = {}
        self._failed_creates: set[tuple[str, str, int]] = set()
        self._owned: dict[str, int] = {}
        self._sharing: dict[str, None] = {}

    def report_violation(self, message: str) -> None:
        """Report a promise that is broken.

        Raises:
            ViolationError: Always; the daemon may catch it, and ``violation`` is what counts.
        """
        self.violation = self.violation or message
        raise ViolationError(message)

    # -- calls --------------------------------------------------------------------------------------------

    def _known(self, kubelet_call: KubeletCall, container_id: str) -> Container | None:
        return kubelet_call.daemon.executor.state.containers.get(container_id)

    def forwarded(self, kubelet_call: KubeletCall) -> None:
        """Note that the daemon forwards a call."""
        self._check_hold_time(kubelet_call)
        if kubelet_call.daemon.call_flow.replaced and kubelet_call.method not in END_POINTS:
            named = f"{kubelet_call.method} (call {kubelet_call.serial})"
            self.report_violation(f"{named} is forwarded by a daemon that was replaced")
        kubelet_call.undecided = (
            not kubelet_call.daemon.executor.reconciled.is_set()
            or kubelet_call.daemon.executor.store.mode.in_release
        )
        if kubelet_call.method == "CreateContainer":
            self._create_forwarded(kubelet_call)
        elif kubelet_call.method == "RunPodSandbox":
            self._sandbox_forwarded(kubelet_call)
        elif kubelet_call.method == "StopPodSandbox":
            self._chosen.pop(
                pb.StopPodSandboxRequest.FromString(kubelet_call.body or b"").pod_sandbox_id, None
            )
        elif kubelet_call.method == "StartContainer":
            container_id = pb.StartContainerRequest.FromString(kubelet_call.body or b"").container_id
            known = self._known(kubelet_call, container_id)
            if known is not None:
                self._set_role(container_id, _role(known))

    def _create_forwarded(self, kubelet_call: KubeletCall) -> None:
        request = pb.CreateContainerRequest.FromString(kubelet_call.body or b"")
        meta = request.config.metadata
        for container in kubelet_call.daemon.executor.state.in_sandbox(request.pod_sandbox_id):
            if container.name == meta.name and container.attempt == meta.attempt:
                self._creates[request.pod_sandbox_id, meta.name, meta.attempt] = _role(container)
                chosen, has = self._chosen.get(request.pod_sandbox_id), container.placement.exclusive
                # kubelet may remove a sandbox again that it removed before, and meet a new one with its id.
                exists = request.pod_sandbox_id in self.node.runtime.sandboxes
                is_other = chosen and exists and not kubelet_call.undecided and has.bits != chosen
                if is_other and self._is_resized(kubelet_call, request, len(has)):
                    self._chosen[request.pod_sandbox_id] = has.bits if self.disk_works else 0
                elif is_other:
                    self.report_violation(
                        f"{container.ref} gets {has or 'no CPUs'}, and its pod has {text_of(chosen or 0)}"
                    )
                if container.placement.pool is Pool.OWN and not self.suspended:
                    self._check_record(container, "is forwarded")
                return

    def _is_resized(self, kubelet_call: KubeletCall, request: pb.CreateContainerRequest, count: int) -> bool:
        """Return whether a pod has requested this number of CPUs, and all its containers have ended.

        The create that requested it may have been withdrawn. A container does not count whose create was
        answered with an error, although the runtime has made it: the daemon learns of it from the next list,
        maybe after it has decided this create.
        """
        known = kubelet_call.daemon.executor.state.containers
        inside = [one for one in self.node.runtime.containers_in(request.pod_sandbox_id) if one.id in known]
        requested = self.node.kubelet.requested_cpu_counts.get(request.pod_sandbox_id, ())
        return count in requested and all(one.state == EXITED or self._has_failed(one) for one in inside)

    def create_failed(self, kubelet_call: KubeletCall) -> None:
        """The client learns that a create has failed; the runtime may have made the container."""
        request = pb.CreateContainerRequest.FromString(kubelet_call.body or b"")
        meta = request.config.metadata
        self._failed_creates.add((request.pod_sandbox_id, meta.name, meta.attempt))

    def _has_failed(self, container: SimulatedContainer) -> bool:
        """Return whether a container was made by a create that failed, and does not run."""
        key = (container.sandbox.id, container.name, container.attempt)
        return container.state == CREATED and key in self._failed_creates

    def _sandbox_forwarded(self, kubelet_call: KubeletCall) -> None:
        uid = pb.RunPodSandboxRequest.FromString(kubelet_call.body or b"").config.metadata.uid
        for pod in kubelet_call.daemon.executor.state.pods.values():
            if pod.uid == uid and pod.cpuset is not None and pod.cpuset_chosen_locally:
                kubelet_call.chosen = pod.cpuset.bits

    def sandbox_answered(self, kubelet_call: KubeletCall, message: bytes) -> None:
        """The client learns that its sandbox is there: the pod keeps the CPUs that were chosen for it."""
        if kubelet_call.chosen and self.disk_works:
            self._chosen[pb.RunPodSandboxResponse.FromString(message).pod_sandbox_id] = kubelet_call.chosen

    def _check_record(self, container: Container, event: str) -> None:
        """Check that a container owns CPUs according to the ledger."""
        keys = f"i/{container.id}", f"c/{container.id}", f"p/{container.pod.sandbox_id}"
        if self.disk_works and not any(key in self.durable for key in keys):
            self.report_violation(f"{container.ref} {event}, and the ledger has no record of its CPUs")

    def decided(self, kubelet_call: KubeletCall) -> None:
        """Handle the end of a call."""

    def _check_hold_time(self, kubelet_call: KubeletCall) -> None:
        held = self.node.schedule.now - kubelet_call.sent_at
        if held > self.node.hold_limit:
            self.report_violation(
                f"{kubelet_call.method} (call {kubelet_call.serial}) was held for {held:.1f} s"
            )

    def check_held_calls(self) -> None:
        """Check that no call is held for too long."""
        for kubelet_call in self.node.kubelet.kubelet_calls:
            if kubelet_call.body is None and not kubelet_call.over and kubelet_call.daemon.alive:
                self._check_hold_time(kubelet_call)

    # -- containers ---------------------------------------------------------------------------------------

    def sandbox_made(self, sandbox_id: str) -> None:
        """The runtime has made a sandbox: creates for an earlier one of the same id are over."""
        self._chosen.pop(sandbox_id, None)
        self.node.kubelet.requested_cpu_counts.pop(sandbox_id, None)
        self._creates = {key: role for key, role in self._creates.items() if key[0] != sandbox_id}
        self._failed_creates = {key for key in self._failed_creates if key[0] != sandbox_id}

    def created(self, container: SimulatedContainer) -> None:
        """Note that the runtime has created a container."""
        role = self._creates.pop((container.sandbox.id, container.name, container.attempt), None)
        if role is not None:
            self.roles[container.id] = role

    def _set_role(self, container_id: str, role: Role) -> None:
        if container_id not in self._owned and container_id not in self._sharing:
            self.roles[container_id] = role

    def began(self, container: SimulatedContainer) -> None:
        """Note that the program of a container is executed."""
        role = self.roles.get(container.id)
        if role is None:
            return
        if role.owner:
            self._owned[container.id] = self._cpus_of_owner(container.id) & self.node.kernel.online
        else:
            self._sharing[container.id] = None
        self.written(self.node.kernel.groups[container.path])

    def ended(self, container: SimulatedContainer) -> None:
        """A container has exited."""
        self._owned.pop(container.id, None)
        self._sharing.pop(container.id, None)
        self.roles.pop(container.id, None)

    # -- cpusets ------------------------------------------------------------------------------------------

    def daemon_writes(self, group: SimulatedGroup, bits: int) -> None:
        """The daemon writes a cpuset."""
        daemon = self.node.daemon
        if not bits:
            self.report_violation(f"an empty cpuset is written to {group.path}")
        if daemon is not None and daemon.executor.store.mode is NodeMode.RELEASED:
            self.report_violation(f"{text_of(bits)} is written to {group.path}, and the node is released")

    def runtime_writes(self, container: SimulatedContainer, bits: int) -> None:
        """The runtime writes a cpuset that the daemon gave to it."""
        if not bits:
            self.report_violation(f"an empty cpuset is written to {container.path}")

    def written(self, group: SimulatedGroup) -> None:
        """Note that the effective set of a group may have changed."""
        if not group.container_id:
            for child in group.children.values():
                self.written(child)
            return
        self.checks += 1
        container_id, kernel = group.container_id, self.node.kernel
        trusted, has = kernel.is_trusted(group), kernel.effective(group)
        if container_id in self._owned:
            own = self._cpus_of_owner(container_id)
            self._owned[container_id] = has & own if trusted else self._owned[container_id] & kernel.online
            self._check_owner_alone(container_id)
        if trusted and (container_id in self._sharing or container_id in self._owned):
            self._check_off_owners(container_id, has)

    def _cpus_of_owner(self, container_id: str) -> int:
        """Return the CPUs that an owner was given, with those that stand in for CPUs that are offline."""
        role, daemon = self.roles[container_id], self.node.daemon
        container = daemon.executor.state.containers.get(container_id) if daemon is not None else None
        if container is not None:
            role.replacement = container.placement.replacement.bits
            self._end_move(container)
        return union(role.exclusive_sets) | role.replacement

    def _end_move(self, container: Container) -> None:
        """Forget the other CPUs of a move whose daemon has ended, if the ledger has no record of it.

        Then no daemon keeps both sets free: the placement counts. A move of another owner may be under way.
        """
        role, now = self.roles[container.id], container.placement.exclusive.bits
        is_over = role.mover is not self.node.daemon and container.id not in self._moving
        if len(role.exclusive_sets) > 1 and is_over and now in role.exclusive_sets:
            role.exclusive_sets = {now}

    def _check_off_owners(self, container_id: str, has: int) -> None:
        """Check that a container is not on the CPUs of another owner."""
        if self.suspended:
            return
        role = self.roles[container_id]
        batch = role.pool is Pool.BE
        for owner, cpus in self._owned.items():
            other = self.roles[owner]
            if (
                has & cpus
                and (not batch or other.excludes_be)
                and (not role.owner or other.owner != role.owner)
                and has & (cpus := self._found_as_planned(owner, cpus))
            ):
                self.report_violation(
                    f"{container_id} ({role.pool}) runs on {text_of(has)}, and {owner} owns {text_of(cpus)}"
                )

    def _found_as_planned(self, owner: str, cpus: int) -> int:
        """Return the CPUs of an owner; another program may have written the planned set.

        The daemon reads its cgroup and need not write it. Until then it has those of the last trusted write.
        """
        node, daemon = self.node, self.node.daemon
        group = node.kernel.groups[node.runtime.containers[owner].path]
        container = daemon.executor.state.containers.get(owner) if daemon is not None else None
        if daemon is None or container is None or node.kernel.is_trusted(group):
            return cpus
        has, planned = node.kernel.effective(group), daemon.executor.state.desired_cpus(container)
        return has & self._cpus_of_owner(owner) if has == planned.bits else cpus

    def _check_owner_alone(self, container_id: str) -> None:
        """Check that no other container is on the CPUs of an owner."""
        if self.suspended or not self._owned[container_id]:
            return
        kernel, runtime = self.node.kernel, self.node.runtime
        for other in (*self._owned, *self._sharing):
            group = kernel.groups[runtime.containers[other].path]
            if other != container_id and kernel.is_trusted(group):
                self._check_off_owners(other, kernel.effective(group))

    def resume(self) -> None:
        """The node is placed again: check everything."""
        self.suspended = False
        for container_id in self._owned:
            self._check_owner_alone(container_id)

    # -- the ledger and the state -------------------------------------------------------------------------

    def stored(self, changes: Mapping[str, Mapping[str, object] | None]) -> None:
        """The ledger has written some records."""
        self.disk_works = True
        for key, value in changes.items():
            if value is None:
                self.durable.pop(key, None)
            else:
                self.durable[key] = json.loads(json.dumps(value))
            if key == RELEASE_RECORD and value is not None and value["stage"] == NodeMode.RELEASED.value:
                self._check_given_back()
            if key.startswith("m/"):
                records = (record for name, record in self.durable.items() if name.startswith("m/"))
                self._moving = frozenset(i for record in records for i in record["containers"])

    def _check_given_back(self) -> None:
        """Check that a release has given every container back what it would have without the daemon."""
        kernel, runtime, daemon = self.node.kernel, self.node.runtime, self.node.daemon
        assert daemon is not None
        for simulated in runtime.containers.values():
            container = daemon.executor.state.containers.get(simulated.id)
            group = kernel.groups.get(simulated.path)
            if container is None or simulated.state == EXITED or (group is not None and group.foreign):
                continue
            named = target_of(container, kernel.full_machine, CpuManager()).cpus
            above = kernel.effective(kernel.groups[simulated.sandbox.parent.strip("/")])
            wanted = above if named is None else named.bits & above or above
            wanted &= daemon.executor.state.node.machine.online.bits  # others have come online just now
            ref = f"{simulated.id} is released, and"
            if simulated.begun and group is not None and kernel.is_trusted(group):
                has = kernel.effective(group)
                if wanted & ~has:
                    self.report_violation(f"{ref} is on {text_of(has)} of {text_of(wanted)}")
            if simulated.cpus and not simulated.undecided and wanted & ~bits_of(simulated.cpus):
                self.report_violation(f"{ref} has the saved cpuset {simulated.cpus} of {text_of(wanted)}")

    def ledger_opened(self, entries: Mapping[str, Mapping[str, object]]) -> None:
        """A daemon starts with the ledger: nothing that was written is lost."""
        opened = {key: json.loads(json.dumps(value)) for key, value in entries.items()}
        if opened != self.durable:
            wrong = sorted(k for k in {*opened, *self.durable} if opened.get(k) != self.durable.get(k))
            self.report_violation(f"the ledger has lost or changed records: {', '.join(wrong)}")

    @property
    def moves_under_way(self) -> bool:
        """Return whether an owner is being moved according to the ledger."""
        return bool(self._moving)

    def run_cheap_checks(self) -> None:
        """Run the cheap checks."""
        daemon = self.node.daemon
        if daemon is not None and (found := daemon.internal_errors):
            self.report_violation("; ".join(found[:3]))
        self.check_held_calls()

    def check_invariants(self) -> None:
        """Check the invariants of the state, and that owners still own."""
        daemon = self.node.daemon
        if daemon is None:
            return
        if found := violations(daemon.executor.state):
            self.report_violation("; ".join(found[:3]))
        if daemon.is_enforcing and not self.suspended:
            self.check_owners()

    def check_owners(self) -> None:
        """Check that each owner that runs has the CPUs that it was given, by the daemon's account."""
        daemon = self.node.daemon
        assert daemon is not None
        containers = daemon.executor.state.containers
        for container_id in self._owned:
            container = containers.get(container_id)
            if container is not None:
                self._end_move(container)
            given = self.roles[container_id].exclusive_sets
            if container is None:
                self.report_violation(
                    f"{container_id} owns {' or '.join(map(text_of, given))}, and the daemon does not know it"
                )
            elif container.placement.exclusive.bits not in given:
                has = container.placement.exclusive
                self.report_violation(
                    f"{container_id} was given {' or '.join(map(text_of, given))}, and has {has or 'nothing'}"
                )
