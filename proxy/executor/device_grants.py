"""Queries device plugins: which devices they prefer, and what a container needs to use its devices.

The order of a create is kubelet's: the devices are chosen and Allocate is called when the pod is admitted,
and PreStartContainer right before CreateContainer (kubernetes v1.36, pkg/kubelet/cm/devicemanager/manager.go
``Allocate``, ``GetDeviceRunContainerOptions``). The proxy sees the containers of a pod one by one, so all
three happen before the container's create is forwarded:

    decide (the devices are already taken in the state; a preference is requested before)
    -> Allocate, for resources whose plugins have not answered for this container before
    -> ledger: the devices and the answers
    -> PreStartContainer
    -> hooks, reservation of CPUs, forward

The devices that a container was given stay with its pod, even if the create fails: the next attempt gets the
same devices without another Allocate. The reservation is undone only if Allocate itself fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from proxy.allocation.devices.allocate import QueryPreference
from proxy.engine.container_events import AllocateFailed, DevicesAllocated
from proxy.engine.held_devices import POD_DEVICES_RECORD, holds_all, record_of
from proxy.engine.node_effects import PlanDecided, PodDecided
from proxy.engine.node_events import DevicesImported
from proxy.engine.reservation_events import LedgerWritten
from proxy.executor.background import Worker
from proxy.executor.context import NodeContext
from proxy.executor.create_decisions import CreateDecisions
from proxy.executor.device_ports import DevicePluginError, DevicePlugins, KubeletAllocations
from proxy.executor.sandboxes import Sandboxes
from proxy.model.devices import AllocateAnswer
from proxy.model.workload import Container, Pod, Request

Answers = Mapping[str, AllocateAnswer]
Wanted = tuple[tuple[str, tuple[str, ...]], ...]
"""Devices to request from plugins, by resource."""
Preferred = dict[tuple[str, str], tuple[str, ...] | None]


class DeviceGrants:
    """Gives devices to containers."""

    def __init__(
        self,
        context: NodeContext,
        plugins: DevicePlugins,
        creates: CreateDecisions,
        sandboxes: Sandboxes,
        worker: Worker,
        kubelet: KubeletAllocations | None = None,
    ) -> None:
        """Prepare; no plugin is called yet.

        Args:
            context: The node.
            plugins: The device plugins.
            creates: Decides creates.
            sandboxes: Decides pods as a whole.
            worker: Reads files.
            kubelet: What kubelet's device manager has assigned; None if unknown.
        """
        self._context = context
        self._plugins = plugins
        self._creates = creates
        self._sandboxes = sandboxes
        self._worker = worker
        self._kubelet = kubelet
        self._allocating: dict[tuple[str, str, Wanted], asyncio.Task[Answers | DevicePluginError]] = {}

    async def take_over(self, resource: str) -> None:
        """Before a resource is managed here, let containers keep those of its devices that kubelet gave them.

        Raises:
            DevicePluginError: Kubelet's assignments cannot be read, so devices in use would count as free.
        """
        context = self._context
        if self._kubelet is None or resource in context.state.devices.registered:
            return
        pods = await self._worker.run(self._kubelet.read, resource)
        with_resource = {
            key: pod for key, pod in pods.items() if any(resource in each for each in pod.values())
        }
        if with_resource:
            every = not context.reconciled.is_set()  # the next reconcile drops those that are gone
            context.store.handle(DevicesImported(resource, with_resource, every))
            context.telemetry.event(
                "took over devices from kubelet", resource=resource, pods=len(with_resource)
            )

    async def place(self, pod: Pod, name: str, attempt: int, request: Request) -> PlanDecided:
        """Decide a create, with what plugins prefer."""
        preferred = self._unread_preferences(pod, name)
        while True:
            decided = self._creates.place_or_query(pod, name, attempt, request, preferred)
            if isinstance(decided, PlanDecided):
                return decided
            await self._query(decided, preferred)
            pod = self._context.state.current_pod(pod)

    async def admit(self, pod: Pod, total: Request) -> PodDecided:
        """Decide a pod as a whole, with what plugins prefer."""
        preferred = self._unread_preferences(pod)
        while True:
            decided = self._sandboxes.admit_or_query(pod, total, preferred)
            if isinstance(decided, PodDecided):
                return decided
            await self._query(decided, preferred)

    async def prepare(self, container: Container) -> Answers:
        """Query plugins for what a container needs to use the devices that are reserved for it.

        Returns:
            The answers, by resource.

        Raises:
            DevicePluginError: A plugin has not answered, or the ledger cannot be written.
        """
        key, name = container.pod.key, container.name
        wanted = tuple(self._context.state.devices.unanswered(key, name).items())
        task = self._allocating.get((key, name, wanted))
        if task is None:
            # A client that gives up does not end it: the next attempt waits for the same answer.
            task = asyncio.get_running_loop().create_task(self._allocate(key, name, dict(wanted)))
            self._allocating[key, name, wanted] = task
            task.add_done_callback(lambda _: self._allocating.pop((key, name, wanted), None))
        answers = await asyncio.shield(task)
        if isinstance(answers, DevicePluginError):
            raise answers
        if not holds_all(self._context.state, container):
            return answers  # another pod may hold its devices by now; the create is refused when it continues
        for resource, ids in container.placement.devices:
            if self._plugins.needs_pre_start(resource):
                await self._plugins.pre_start(resource, ids)
        return answers

    def close(self) -> None:
        """Stop waiting for plugins."""
        for task in self._allocating.values():
            task.cancel()

    async def _allocate(
        self, key: str, name: str, wanted: Mapping[str, tuple[str, ...]]
    ) -> Answers | DevicePluginError:
        context, answers = self._context, dict[str, AllocateAnswer]()
        resource = ""
        try:
            for resource, ids in wanted.items():
                answers[resource] = await self._plugins.allocate(resource, ids)
        except DevicePluginError as error:
            context.store.handle(AllocateFailed(key, name, wanted))
            return error
        except Exception as error:  # noqa: BLE001  a container must not run without its devices
            context.store.handle(AllocateFailed(key, name, wanted))
            context.report_internal_error(error)
            return DevicePluginError(resource, f"internal error: {type(error).__name__}: {error}")
        context.store.handle(DevicesAllocated(key, name, answers, wanted))
        record = {f"{POD_DEVICES_RECORD}{key}": record_of(context.state.devices, key)}
        stored = await context.ledger_writer.append(record, durable=True)
        if not isinstance(stored, LedgerWritten):
            return DevicePluginError(resource, f"the devices cannot be recorded: {stored.cause}")
        return context.state.devices.answers_of(key, name)

    def _unread_preferences(self, pod: Pod, name: str = "") -> Preferred:
        """Return the resources of a container, or of all, whose plugins have a preference to read."""
        return {
            (container.name, resource): None
            for container in (pod.requests.containers if pod.requests else ())
            if name in ("", container.name)
            for resource in container.limits
            if resource in self._context.state.devices.registered
            and self._plugins.offers_preference(resource)
        }

    async def _query(self, question: QueryPreference, preferred: Preferred) -> None:
        """Query a plugin; one that has no preference, or fails, is not queried again for this call."""
        answer = await self._plugins.preferred(
            question.resource, question.available, question.must_include, question.size
        )
        preferred[question.container, question.resource] = answer
