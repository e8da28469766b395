"""Looks up facts that the CRI does not carry, before a decision about a pod or a container.

Only kubelet knows what a pod's containers request. Kubelet or sysfs knows where devices are. Both are
queried in worker threads, and only if the answer can change a decision. A fact that cannot be obtained within
the deadline of a held call is left out: the decision is made from the known facts.

Kubelet's report about a pod is kept. A container that is created again may have been resized in between; then
its create carries other amounts than the report, and kubelet is queried again. If kubelet does not answer, or
reports amounts that are not in effect (a deferred resize), the amounts of the create count
(``engine.decisions``, ``create_requested``).

Theory of ``KubeletCpus`` (kubernetes v1.36 pkg/kubelet/cm/cpumanager/policy_static.go, Allocate). Under
policy ``static`` kubelet assigns CPUs when it admits a pod, and writes them to its state file before it
requests a sandbox. The create of the container follows later, with these CPUs in its request. In between,
only the file shows these CPUs. So the file is read at each reconcile, and before CPUs are chosen for any
container; that costs a ``stat`` while the file is unchanged. Its assignments become part of the state of the
node (``NodeState.with_kubelet_cpus``): the pools lose these CPUs at once, no other container is given them,
and containers that run there move away. When kubelet removes an entry, the pools get the CPUs back. CPUs that
had an owner here first stay with that owner (``engine.kubelet_cpus``).

Containers may have exited unnoticed when the next container of their pod is created. If the runtime sends no
events, only a reconcile, seconds later, finds that a container has exited; and an event may arrive too late.
Kubelet creates the next container as soon as an init container has exited (kubernetes v1.36
pkg/kubelet/cm/cpumanager/policy_static.go, updateCPUsToReuse). If kubelet does not report which containers
are init containers, only the runtime can be queried. So before a decision the runtime is queried about each
container of the pod that still holds CPUs or memory.
"""

from __future__ import annotations

import asyncio
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from msgspec import structs

from proxy.allocation.devices.hints import family
from proxy.allocation.devices.state import RegisteredDevice
from proxy.engine.kubelet_cpus import clashes
from proxy.engine.node import Node
from proxy.engine.node_effects import KubeletCpusChanged
from proxy.engine.node_events import KubeletCpusRead
from proxy.engine.state import NodeState
from proxy.executor.background import Worker
from proxy.executor.container_lifecycle import ContainerLifecycle
from proxy.executor.context import NodeContext
from proxy.executor.ports import DeviceFacts, DeviceLocator, Kubelet
from proxy.model.errors import RuntimeCallError, UnavailableError
from proxy.model.idset import Mask
from proxy.model.kubelet import CpuManager, Held
from proxy.model.options import TopologyPolicy
from proxy.model.workload import KubeQos, LocatedDevice, Phase, Pod, Request
from proxy.pools.claims import STRICT, may_own, whole_cpus
from proxy.pools.cri_resources import carries_other_amounts
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.executor.ports import KubeletCpuManager


THREADS = 4
LATE = "cannot look up in time what a pod requests, or where its devices are"
T = TypeVar("T")
P = ParamSpec("P")


class FactLookup:
    """Queries kubelet and sysfs."""

    def __init__(
        self,
        context: NodeContext,
        lifecycle: ContainerLifecycle,
        kubelet: Kubelet | None,
        hardware: DeviceLocator | None,
    ) -> None:
        """Query nothing yet.

        Args:
            context: Has the deadline of calls, and where to report.
            lifecycle: Records which containers have exited.
            kubelet: What kubelet knows; None to query nothing.
            hardware: Where devices are; None if there is no source for that.
        """
        self._context = context
        self._lifecycle = lifecycle
        self._kubelet = kubelet
        self._hardware = hardware
        self.worker = Worker("fact-lookup", context.report_internal_error, THREADS)

    def needs_pod_requests(self, state: NodeState, pod: Pod) -> bool:
        """Return whether to query kubelet for what a pod's containers request."""
        kubelet, node = self._kubelet, state.node
        if kubelet is None or not kubelet.knows_pods or pod.requests is not None:
            return False
        if state.devices.registered or pod.key in state.devices.held:
            return True  # devices are in the pod's limits and nowhere in the CRI
        if node.decides_pods and kubelet.knows_devices:
            return True  # the containers' names are needed to request their devices
        counts = node.static or node.memory is not None
        return counts and pod.kube_qos is KubeQos.GUARANTEED

    def is_outdated(self, pod: Pod, name: str, request: Request) -> bool:
        """Return whether to query kubelet again for a pod: a container's create differs from its report."""
        if self._kubelet is None or not self._kubelet.knows_pods or pod.requests is None:
            return False
        return carries_other_amounts(pod.requests, name, request)

    def devices_matter(self, node: Node, pod: Pod) -> bool:
        """Return whether the location of a container's devices can change the decision about it."""
        owns = (node.static or node.memory is not None) and pod.kube_qos is KubeQos.GUARANTEED
        return owns or node.policy is not TopologyPolicy.NONE

    def knows_devices(self, listed: DeviceFacts) -> bool:
        """Return whether there is a source for where a container's devices are."""
        known = self._kubelet is not None and self._kubelet.knows_devices
        return known or (bool(listed) and self._hardware is not None)

    async def pod(self, pod: Pod) -> Pod:
        """Look up what a pod's containers request; returns the pod unchanged if that is unknown."""
        return await self._in_time(pod, pod, self._pod, pod)

    async def devices(self, pod: Pod, name: str, listed: DeviceFacts, request: Request) -> Request:
        """Look up where the devices of a container are."""
        near = await self._in_time(pod, (), self._devices, pod, name, listed)
        return structs.replace(request, devices=near) if near else request

    async def pod_devices(self, pod: Pod, total: Request) -> Request:
        """Look up where a whole pod's devices are: kubelet allocates them before it makes the sandbox."""
        near = await self._in_time(pod, (), self._pod_devices, pod)
        return structs.replace(total, devices=near) if near else total

    async def record_exited(self, pod: Pod) -> None:
        """Read from the runtime which of the pod's holders have exited, and record that in the state.

        If the runtime does not answer, the state stays as it is.
        """
        await asyncio.gather(*map(self._record_if_exited, holders(self._context.state, pod)))

    async def _record_if_exited(self, container_id: str) -> None:
        context = self._context
        since = context.state.runtime.changes.number
        try:
            listed = await self.worker.run(context.runtime.list_containers, container_id)
        except (UnavailableError, RuntimeCallError):
            return
        ended = any(c.id == container_id and c.phase is Phase.EXITED for c in listed)
        if ended and context.state.runtime.changes.is_unchanged(container_id, since):
            self._lifecycle.phase(container_id, Phase.EXITED)

    async def _in_time(
        self, pod: Pod, otherwise: T, query: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Query in a worker. If no answer comes in time, return the default."""
        context = self._context
        try:
            async with asyncio.timeout(context.options.call_timeout):
                return await self.worker.run(query, *args, **kwargs)
        except TimeoutError:
            context.telemetry.problem(LATE, pod=pod.ref)
            return otherwise

    def _pod(self, pod: Pod) -> Pod:
        assert self._kubelet is not None
        kubelet = self._kubelet

        def with_requests() -> Pod:
            answer = kubelet.pod_requests(pod.uid, pod.namespace, pod.name)
            if answer is None:
                return pod
            requests, source = answer
            # The QoS class by the cgroup parent counts: it is the one that takes effect in the kernel.
            guaranteed = requests.guaranteed and pod.kube_qos is KubeQos.GUARANTEED
            requests = structs.replace(requests, uid=pod.key, guaranteed=guaranteed)
            return structs.replace(pod, requests=requests, source=source)

        return self._try(with_requests, pod)

    def _devices(self, pod: Pod, name: str, listed: DeviceFacts) -> tuple[LocatedDevice, ...]:
        if self._kubelet is not None and self._kubelet.knows_devices:
            answer = self._device_nodes(self._kubelet, pod, (name,))
            if answer:
                return answer
        hardware = self._hardware
        return self._try(lambda: hardware.locate(listed), ()) if listed and hardware is not None else ()

    def _pod_devices(self, pod: Pod) -> tuple[LocatedDevice, ...]:
        if self._kubelet is None or not self._kubelet.knows_devices or pod.requests is None:
            return ()
        return self._device_nodes(
            self._kubelet, pod, [container.name for container in pod.requests.containers]
        )

    def _device_nodes(self, kubelet: Kubelet, pod: Pod, names: Iterable[str]) -> tuple[LocatedDevice, ...]:
        """Query kubelet for the devices of some containers of a pod."""

        def located() -> tuple[LocatedDevice, ...]:
            found: list[LocatedDevice] = []
            for name in names:
                found += kubelet.devices(pod.namespace, pod.name, name) or ()
            return measured(tuple(found), kubelet.allocatable()) if found else ()

        return self._try(located, ())

    def _try(self, query: Callable[[], T], otherwise: T) -> T:
        """Run a query; an internal error is reported, and the decision is made without the answer."""
        try:
            return query()
        except Exception as error:  # noqa: BLE001  a decision is made from the known facts
            self._context.report_internal_error(error)
            return otherwise

    def close(self) -> None:
        """End the threads, and close what they hold open."""
        self.worker.close()
        if self._kubelet is not None:
            self._kubelet.close()


def measured(
    near: tuple[LocatedDevice, ...], distances: Mapping[str, Mapping[str, Mask | None]]
) -> tuple[LocatedDevice, ...]:
    """Set for each device the smallest number of NUMA nodes that could hold as many devices of its kind.

    See kubernetes v1.36 pkg/kubelet/cm/devicemanager/topology_hints.go, generateDeviceTopologyHints.

    Args:
        near: The devices that a container, or a pod, was given.
        distances: All devices: resource to id to NUMA nodes.
    """
    counts = Counter(device.resource for device in near)
    least: dict[str, int] = {}
    for resource, count in counts.items():
        devices = {i: RegisteredDevice(i, nodes) for i, nodes in distances.get(resource, {}).items()}
        nodes = Mask.from_bits(
            functools.reduce(operator.or_, (d.nodes.bits for d in devices.values() if d.nodes), 0)
        )
        if len(devices) >= count and nodes:
            least[resource] = family(devices, count, nodes, frozenset(devices)).size
    return tuple(structs.replace(device, fewest_numa_nodes=least.get(device.resource, 0)) for device in near)


STATE_FILE_LATE = "cannot read kubelet's state file: the file system does not answer"
UNLIKE_KUBELET = "kubelet's CPU manager cannot be followed"


class KubeletCpus:
    """Makes the state follow the assignments of kubelet's CPU manager."""

    def __init__(self, context: NodeContext, port: KubeletCpuManager | None) -> None:
        """Read nothing yet.

        Args:
            context: Has the state.
            port: Reads kubelet's settings and state file; None if nothing reads them.
        """
        self._context = context
        self._port = port
        self._worker = Worker("kubelet", context.report_internal_error)
        context.health.watch(self._worker)
        self._refreshing = asyncio.Lock()
        self._reported: frozenset[str] = frozenset()
        self._checked: tuple[object, object] = (None, None)
        self._counts: Callable[[Held], Held] = lambda held: held

    @property
    def manager(self) -> CpuManager:
        """The settings and assignments that were read last."""
        return self._context.state.facts.cpu_manager

    def count_only(self, counts: Callable[[Held], Held]) -> None:
        """Count only the part of kubelet's assignments that ``counts`` returns, as a takeover does."""
        self._counts = counts

    def needs_cpus_of_container(self, pod: Pod, request: Request) -> bool:
        """Return whether a container may be given CPUs of its own, so that kubelet's must be known."""
        if self._port is None:
            return False
        if pod.cpuset or pod.qos in STRICT:
            return True
        return may_own(pod) and (pod.requests is not None or whole_cpus(request) > 0)

    async def refresh(self, worker: Worker) -> None:
        """Read kubelet's settings if that is due, in a worker that may block; then call ``reread``."""
        if self._port is None:
            return
        try:
            async with self._refreshing:
                await worker.run(self._port.refresh)
        except Exception as error:  # noqa: BLE001 - this must not end the whole reconcile
            self._context.report_internal_error(error)
        await self.reread()

    async def reread(self) -> None:
        """Read kubelet's assignments and update the state; if that takes too long, the state stays."""
        if self._port is None:
            return
        context = self._context
        try:
            async with asyncio.timeout(context.options.call_timeout):
                manager = await self._worker.run(self._port.read)
        except TimeoutError:
            context.telemetry.problem(STATE_FILE_LATE)
        except Exception as error:  # noqa: BLE001 - an internal error must not stop the node
            context.report_internal_error(error)
        else:
            context.telemetry.resolved(STATE_FILE_LATE)
            self._apply_read(manager)

    def _apply_read(self, manager: CpuManager) -> None:
        context = self._context
        for effect in context.store.handle(KubeletCpusRead(manager, self._counts(manager.held))):
            if type(effect) is KubeletCpusChanged:
                context.telemetry.count(metrics.KUBELET_CPU_MANAGER_CHANGES)
                context.telemetry.event(
                    "kubelet's CPU manager changed its assignments", came=effect.came, went=effect.went
                )
        if self._checked != (manager, context.state.owners):
            self._checked = manager, context.state.owners
            before, self._reported = self._reported, frozenset((*manager.problems, *clashes(context.state)))
            for problem in sorted(self._reported - before):
                context.telemetry.problem(UNLIKE_KUBELET, reason=problem)
            for problem in before - self._reported:
                context.telemetry.resolved(UNLIKE_KUBELET, reason=problem)

    def page(self) -> dict[str, object]:
        """Return the settings and assignments as plain data; empty if nothing reads them."""
        if self._port is None:
            return {}
        manager, state = self.manager, self._context.state
        names = {pod.uid: pod.ref for pod in state.pods.values()}
        return {
            "cpuManagerPolicy": manager.policy,
            "cpuManagerPolicyOptions": dict(manager.options),
            "reservedSystemCPUs": str(manager.reserved),
            "topologyManagerPolicy": manager.topology_policy,
            "topologyManagerScope": manager.topology_scope,
            "default": str(manager.default),
            "held": [
                {"pod": names.get(uid, ""), "uid": uid, "container": name, "cpus": str(cpus)}
                for uid, containers in sorted(manager.held.items())
                for name, cpus in sorted(containers.items())
            ],
            "sources": dict(manager.sources),
            "problems": [*manager.problems, *clashes(state)],
        }

    def close(self) -> None:
        """End the worker."""
        self._worker.close()


def holders(state: NodeState, pod: Pod) -> list[str]:
    """Return the pod's containers that are recorded as running, and own CPUs or are promised memory.

    Another container can reuse what such a container holds only in a Guaranteed pod. If kubelet has reported
    the pod's containers, it is known without a query which of them have exited
    (``Sandboxes.end_earlier_inits``).
    """
    if pod.requests is not None or pod.kube_qos is not KubeQos.GUARANTEED:
        return []
    if not state.owners and state.memory is None:
        return []
    return [
        c.id
        for c in state.in_sandbox(pod.sandbox_id)
        if c.phase is Phase.RUNNING and (c.placement.exclusive or c.placement.blocks)
    ]
