"""CreateContainer: the call that everything here is about."""

from __future__ import annotations

import dataclasses

from proxy.api.cri import api_pb2 as pb
from proxy.controller.controller import Keeper
from proxy.controller.exited_siblings import holders, see_ended
from proxy.controller.ports import DeviceFacts
from proxy.controller.reservations import CreateClient
from proxy.engine.admit import with_earlier_decision
from proxy.frontends.cri.call import HeldCall, Hold, Trip
from proxy.frontends.cri.decode import pod_of, request_of, with_total
from proxy.frontends.cri.device_facts import given_of
from proxy.frontends.cri.hook_gateway import NOBODY, HookGateway
from proxy.frontends.cri.lenient_text import identity, text
from proxy.frontends.cri.rewrite import create_suffix
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet
from proxy.model.workload import Container, Pod, Pool, Request
from proxy.telemetry.port import subject

NO_DEVICES = DeviceFacts()
"""Stands for devices that nobody has looked for, as they could change nothing."""


class CreateCalls:
    """CreateContainer."""

    def __init__(self, keeper: Keeper, hold: Hold) -> None:
        self.keeper = keeper
        self.hooked: HookGateway = NOBODY
        self.requests = {"CreateContainer": self._create}
        self.finished = {"CreateContainer": self._create_done}
        self._hold = hold

    def _create(self, call: HeldCall) -> None:
        message = pb.CreateContainerFacts.FromString(call.body)
        config, sandbox_id = message.config, text(message.pod_sandbox_id)
        pod = self.keeper.state.pods.get(sandbox_id)
        if pod is None or not (pod.cgroup_parent or pod.cgroup_changed_by_hook):
            known = pod
            pieces = message.sandbox_config
            raw = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pod = pod_of(pb.SandboxFacts.FromString(raw), sandbox_id, self.keeper.state.node.machine.bounds)
            if known is not None:
                pod = dataclasses.replace(
                    with_earlier_decision(pod, known), asks=known.asks, source=known.source
                )
            if pod.uid:
                self._learned(pod)
        elif pod.cpuset is not None and not pod.cpuset_chosen_locally:
            pod = self._renewed(pod, message)
        if pod.cgroup_changed_by_hook:
            from proxy.frontends.cri.hook_bridge.adjust import with_cgroup_parent

            call.change(with_cgroup_parent(call.body, pod.cgroup_parent))
        meta, keeper = config.metadata, self.keeper
        node, request, scout = keeper.state.node, request_of(config.linux.resources), keeper.scout
        given = given_of(config) if scout.devices_matter(node, pod) else NO_DEVICES
        asks = scout.pod_matters(node, pod) or (given is not NO_DEVICES and scout.knows_devices(given))
        if asks or holders(keeper.state, pod) or keeper.beside.matters(pod, request):
            self._hold(call, self._find_out(call, pod, text(meta.name), meta.attempt, request, given))
        else:
            self._decide(call, pod, text(meta.name), meta.attempt, request)

    def _renewed(self, pod: Pod, message: pb.CreateContainerFacts) -> Pod:
        """Give a pod whose annotation names CPUs with what it requests now: a resize may have changed it."""
        renewed = with_total(pod, pb.SandboxFacts.FromString(b"".join(message.sandbox_config)))
        if renewed.total != pod.total and pod.sandbox_id in self.keeper.state.pods:
            self._learned(renewed)
        return renewed

    def _learned(self, pod: Pod) -> None:
        """Take what a request says of its pod into the state; that may change which CPUs are shared."""
        store, records = self.keeper.store, {f"p/{pod.sandbox_id}": pod}
        store.change(store.state.with_pod(pod), "pod described by a create", records=records)

    async def _find_out(
        self, call: HeldCall, pod: Pod, name: str, attempt: int, request: Request, given: DeviceFacts
    ) -> None:
        """Ask for what the CRI does not carry, then decide."""
        keeper, node = self.keeper, self.keeper.state.node
        if keeper.scout.pod_matters(node, pod):
            told = await keeper.scout.pod(pod)
            # Somebody may have learned more about the pod meanwhile; only what kubelet told is new.
            pod = keeper.state.pods.get(pod.sandbox_id) or pod
            if told.asks is not None:
                pod = dataclasses.replace(pod, asks=told.asks, source=told.source)
            if pod.sandbox_id in keeper.state.pods:
                keeper.store.change(keeper.state.with_pod(pod), "pod described by kubelet")
        if given is not NO_DEVICES and keeper.scout.knows_devices(given):
            request = await keeper.scout.devices(pod, name, given, request)
            pod = keeper.state.pods.get(pod.sandbox_id) or pod
        await see_ended(keeper, keeper.lifecycle, keeper.scout.worker, pod)
        if keeper.beside.matters(pod, request):
            await keeper.beside.look()
        if not call.done:
            self._decide(call, pod, name, attempt, request)

    def _decide(self, call: HeldCall, pod: Pod, name: str, attempt: int, request: Request) -> None:
        if self.keeper.store.mode.is_leaving:
            call.release()
            return
        self.keeper.sandboxes.moved_on(pod, name)
        plan = self.keeper.creates.place(pod, name, attempt, request)
        if plan.container is None:
            if self.keeper.store.mode.enforces:
                call.refuse(plan.verdict.code, plan.verdict.message)
            else:
                call.release()
            return
        call.state = Trip(target=plan.container.id)
        if not self.keeper.store.mode.enforces:
            call.release()
        elif "pre_create_container" in self.hooked.points:
            self.hooked.create(call, plan.container, self._go_create)
        else:
            self._go_create(call, plan.container)

    def _go_create(self, call: HeldCall, container: Container) -> None:
        placement = container.placement
        if placement.pool is Pool.OWN:
            self._hold(call, self._create_owner(call, container))
        elif placement.hook_cpus is not None:
            self._hold(call, self._create_narrowed(call, container))
        else:
            self._share(call, container)

    async def _create_narrowed(self, call: HeldCall, container: Container) -> None:
        """Write down what hooks have named, which no list of the runtime would say after a crash."""
        keeper = self.keeper
        await keeper.reservations.narrow(container)
        current = keeper.state.containers.get(container.id)
        if call.done:
            return
        if current is None or keeper.store.mode.is_leaving:
            call.release()
        else:
            self._share(call, current)

    def _share(self, call: HeldCall, container: Container) -> None:
        placement, cpus = container.placement, self.keeper.state.wanted(container)
        told = None if self.keeper.state.node.erases(placement) else cpus
        self._goes(call, container, cpus, create_suffix(told, placement.mems))

    def _goes(self, call: HeldCall, container: Container, cpus: CpuSet, suffix: bytes) -> None:
        if isinstance(call.state, Trip):  # else the create is over already
            call.state.sent = cpus
        if self.hooked.active:
            self.hooked.leaves(container.id, call.body)
        call.release(call.body + suffix)

    async def _create_owner(self, call: HeldCall, container: Container) -> None:
        async def placed_elsewhere(new: Container) -> Container | None:
            nonlocal container
            container = new
            if isinstance(call.state, Trip):
                call.state.target = new.id
            if "pre_create_container" in self.hooked.points:
                hooked = await self.hooked.create_elsewhere(call, new)
                if hooked is None:
                    return None
                container = hooked
            return container

        client = CreateClient(lambda: not isinstance(call.state, Trip), placed_elsewhere)
        ended = await self.keeper.reservations.create(container, client)
        if not ended.is_committed:
            if ended.reason is not None:  # else it has been answered
                why = ended.reason.message
                self.keeper.telemetry.problem("cannot free CPUs", **subject(container), err=why)
                words = self.keeper.reservations.answer(ended.reason)
                message = f"cannot free CPUs for {container.ref}: {words}"
                call.refuse(GrpcStatus.FAILED_PRECONDITION, message)
            return
        placement, quota = container.placement, self.keeper.quotas.carried(container)
        cpus = self.keeper.state.wanted(container)
        self._goes(call, container, cpus, create_suffix(cpus, placement.mems, quota))

    def answered(self, trip: Trip, message: bytes) -> None:
        """The runtime has made the container and named it."""
        container_id = identity(pb.Identity.FromString(message).id)
        if container_id:
            trip.named = True
            keeper = self.keeper
            keeper.lifecycle.created(trip.target, container_id, trip.sent)
            made = keeper.state.containers.get(container_id)
            if made and keeper.state.owners and keeper.enforcer.pauses.has_monitors(made.pod):
                keeper.spawn(keeper.writes.clear_sandboxes())

    def _create_done(self, trip: Trip, status: int | None) -> None:
        if trip.named:
            return
        if status in (None, GrpcStatus.OK):  # OK without a readable id: the list says what was made
            self.keeper.lifecycle.uncertain(trip.target)
        else:
            self.keeper.lifecycle.failed(trip.target)
