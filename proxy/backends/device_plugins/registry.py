"""The device plugins of the node, by resource: implements ``proxy.executor.device_ports.DevicePlugins``.

As in kubelet's device manager (kubernetes v1.36 pkg/kubelet/cm/devicemanager/manager.go), a resource belongs
to the plugin that registered it last. When a plugin does not serve, its devices are unhealthy at once
(markResourceUnhealthy); when it has not served for five minutes, the resource is withdrawn
(stopGracePeriodExpired). Neither changes the devices that containers already have.

Unlike in kubelet, the rate of registrations is limited: a plugin that registers again and again must wait
longer each time. A device list that changes nothing is not forwarded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import structs

from proxy.backends.device_plugins.endpoint import EndpointState, PluginEndpoint
from proxy.backends.device_plugins.messages import PluginAnswerError
from proxy.backends.device_plugins.plugin_channel import PluginCallError
from proxy.engine.node_events import DevicesChanged
from proxy.executor.background import Worker, run_with_restarts
from proxy.executor.device_ports import DevicePluginError
from proxy.model.backoff import Backoff, RetryDelays
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.allocation.devices.state import RegisteredDevice
    from proxy.executor.context import NodeContext
    from proxy.model.devices import AllocateAnswer

GRACE_S: Final = 300.0
"""kubelet's ``endpointStopGracePeriod`` (kubernetes v1.36 pkg/kubelet/cm/devicemanager/types.go)."""
RESOURCES_LIMIT: Final = 128
"""The most resources that can be registered at the same time; each has a connection and a thread."""
REGISTER_BACKOFF: Final = Backoff(0.5, 30.0, steady=60.0, tolerated=5)
"""Seconds before a resource can be registered again; this slows down a plugin that keeps restarting."""
NOT_SERVING_PROBLEM: Final = "a device plugin does not serve: its devices are unhealthy"


@dataclass(slots=True)
class ManagedResource:
    """A resource and its plugin.

    Attributes:
        endpoint: The plugin that registered last.
        task: The task that follows its devices.
        reported: The devices that were last reported to the node; None if none were, or after a withdrawal.
        since: When the plugin last began to serve or stopped serving, by the loop's clock.
        registered: How often the resource was registered.
        withdrawal: Withdraws the resource; None while the plugin serves.
    """

    endpoint: PluginEndpoint
    task: asyncio.Task[None]
    reported: Mapping[str, RegisteredDevice] | None
    since: float
    registered: int = 1
    withdrawal: asyncio.TimerHandle | None = None

    def end(self) -> None:
        """Cancel the task and the timer of the plugin."""
        self.endpoint.close()
        self.task.cancel()
        if self.withdrawal is not None:
            self.withdrawal.cancel()


@dataclass(slots=True)
class RegisterPause:
    """The time before a resource can be registered again."""

    delays: RetryDelays = field(default_factory=lambda: RetryDelays(REGISTER_BACKOFF))
    last: float = float("-inf")
    until: float = float("-inf")


class DevicePluginRegistry:
    """Manages the registered plugins and reports their devices; for the event loop."""

    def __init__(self, context: NodeContext, timeout_s: float, grace_s: float = GRACE_S) -> None:
        """Begin without plugins, on the running event loop.

        Args:
            context: The node that is notified about devices.
            timeout_s: Deadline of calls, in seconds.
            grace_s: Seconds after which a resource without a plugin is withdrawn.
        """
        self._timeout_s = timeout_s
        self._context = context
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        self._decoder = Worker("devices", context.report_internal_error)
        self._resources: dict[str, ManagedResource] = {}
        self._pauses: dict[str, RegisterPause] = {}
        self._connecting: set[str] = set()
        self._closed = False
        self._unclaimed = self._loop.call_later(grace_s, self._withdraw_unclaimed)

    # -- registrations ------------------------------------------------------------------------------------

    async def register(self, resource: str, path: Path) -> None:
        """Register a plugin for a resource when it has answered; the previous plugin is dropped.

        Args:
            resource: The resource; its name has been checked.
            path: The socket of the plugin.

        Raises:
            DevicePluginError: The plugin does not answer, or registers too often; or there are too many
                resources, or the daemon stops.
        """
        self._check_registration(resource)
        endpoint = PluginEndpoint(
            resource,
            path,
            self._decoder,
            lambda: self._timeout_s,
            self._context.telemetry,
            self._endpoint_changed,
        )
        self._connecting.add(resource)
        try:
            await endpoint.connect()
        except (PluginCallError, PluginAnswerError) as error:
            endpoint.close()
            raise _failed(resource, "register", path, error) from None
        except BaseException:
            endpoint.close()
            raise
        finally:
            self._connecting.discard(resource)
        if self._closed:
            endpoint.close()
            raise DevicePluginError(resource, f"cannot register {resource}: the daemon stops")
        self._set_endpoint(resource, endpoint)

    def _check_registration(self, resource: str) -> None:
        now = self._loop.time()
        if len(self._pauses) > 2 * RESOURCES_LIMIT:
            self._pauses = {name: each for name, each in self._pauses.items() if name in self._resources}
        pause = self._pauses.setdefault(resource, RegisterPause())
        cause = ""
        if resource in self._connecting:
            cause = "a registration of this resource is under way"
        elif now < pause.until:
            cause = f"it was registered too often: again in {pause.until - now:.1f} s"
        elif resource not in self._resources and len(self._resources) >= RESOURCES_LIMIT:
            cause = f"there are {RESOURCES_LIMIT} resources already"
        if cause:
            raise DevicePluginError(resource, f"cannot register {resource}: {cause}")
        pause.until = now + pause.delays.next(now - pause.last)
        pause.last = now

    def _set_endpoint(self, resource: str, endpoint: PluginEndpoint) -> None:
        task = self._loop.create_task(run_with_restarts(endpoint.run, self._context.restarted))
        before = self._resources.get(resource)
        if before is None:
            self._resources[resource] = ManagedResource(endpoint, task, None, self._loop.time())
        else:
            before.endpoint.close()
            before.task.cancel()
            before.endpoint, before.task = endpoint, task
            before.registered += 1
        self._context.telemetry.event("device plugin registered", resource=resource, path=endpoint.path)

    def change_timeout(self, seconds: float) -> None:
        """Change the deadline of calls."""
        self._timeout_s = seconds

    async def withdraw(self, resource: str, reason: str) -> None:
        """Drop the plugin of a resource, and withdraw the resource; containers keep the devices they have.

        Args:
            resource: The resource; nothing happens if no plugin has registered it, in this run or before.
            reason: The reason, for the log.
        """
        if (managed := self._resources.get(resource)) is not None:
            self._report(managed, None)
            self._drop(resource)
        elif resource in self._context.state.devices.registered:
            self._context.store.handle(DevicesChanged(resource, None))
        else:
            return
        self._context.telemetry.event("resource is withdrawn", resource=resource, reason=reason)

    def close(self) -> None:
        """Drop all plugins; the node keeps the devices that were reported."""
        self._closed = True
        self._unclaimed.cancel()
        for each in self._resources.values():
            each.end()
        self._resources.clear()
        self._decoder.close()

    # -- devices ------------------------------------------------------------------------------------------

    def _endpoint_changed(self, endpoint: PluginEndpoint) -> None:
        """Update the node with the devices of a plugin, or with its state."""
        managed = self._resources.get(endpoint.resource)
        if managed is None or managed.endpoint is not endpoint:
            return
        telemetry = self._context.telemetry
        if endpoint.state is EndpointState.SERVING:
            if managed.withdrawal is not None:
                managed.withdrawal.cancel()
                managed.withdrawal, managed.since = None, self._loop.time()
                telemetry.resolved(NOT_SERVING_PROBLEM, resource=endpoint.resource)
            self._report(managed, endpoint.devices)
            return
        telemetry.problem(
            NOT_SERVING_PROBLEM, resource=endpoint.resource, path=endpoint.path, err=endpoint.reason
        )
        if managed.withdrawal is None:
            managed.since = self._loop.time()
            managed.withdrawal = self._loop.call_later(self._grace_s, self._withdraw, endpoint.resource)
        known = managed.reported if endpoint.devices is None else endpoint.devices
        if managed.reported is not None and known is not None:
            self._report(managed, {name: structs.replace(d, healthy=False) for name, d in known.items()})

    def _report(self, managed: ManagedResource, devices: Mapping[str, RegisteredDevice] | None) -> None:
        resource = managed.endpoint.resource
        # The resource may be from an earlier run of the daemon, with nothing reported in this run.
        is_withdrawn = devices is None and resource in self._context.state.devices.registered
        if devices != managed.reported or is_withdrawn:
            managed.reported = devices
            self._context.telemetry.count(metrics.DEVICE_CHANGES)
            self._context.store.handle(DevicesChanged(resource, devices))

    def _withdraw(self, resource: str) -> None:
        """Withdraw a resource whose plugin has not served for the whole grace period.

        The plugin is dropped if its list has ended, and kept otherwise.
        """
        managed = self._resources[resource]
        self._report(managed, None)
        if managed.endpoint.state is EndpointState.DOWN:
            self._drop(resource)
            self._context.telemetry.event(
                "device plugin has gone: its resource is withdrawn", resource=resource
            )
        else:
            managed.withdrawal = self._loop.call_later(self._grace_s, self._withdraw, resource)

    def _drop(self, resource: str) -> None:
        """Forget the plugin of a resource."""
        self._resources.pop(resource).end()
        self._context.telemetry.resolved(NOT_SERVING_PROBLEM, resource=resource)

    def _withdraw_unclaimed(self) -> None:
        """Withdraw resources of an earlier run of the daemon whose plugins have not registered again."""
        for resource in self._context.state.devices.registered.keys() - self._resources.keys():
            self._context.store.handle(DevicesChanged(resource, None))
            self._context.telemetry.event(
                "device plugin has gone: its resource is withdrawn", resource=resource
            )

    # -- calls: DevicePlugins -----------------------------------------------------------------------------

    def offers_preference(self, resource: str) -> bool:
        """Return whether the plugin of a resource answers ``preferred``."""
        managed = self._resources.get(resource)
        return managed is not None and managed.endpoint.has_preferences

    def needs_pre_start(self, resource: str) -> bool:
        """Return whether ``pre_start`` must be called for a resource before each create."""
        managed = self._resources.get(resource)
        if managed is None:
            # The plugin registered in an earlier run; ``pre_start`` fails until the plugin registers again.
            return resource in self._context.state.devices.registered
        return managed.endpoint.needs_pre_start

    async def preferred(
        self, resource: str, available: frozenset[str], must_include: frozenset[str], size: int
    ) -> tuple[str, ...]:
        """Query a plugin for the devices that it prefers; see ``DevicePlugins``."""
        managed = self._resources.get(resource)
        if managed is None or not managed.endpoint.has_preferences:
            return ()
        return await managed.endpoint.preferred(available, must_include, size)

    async def allocate(self, resource: str, ids: tuple[str, ...]) -> AllocateAnswer:
        """Query a plugin for the settings that a container needs to use devices; see ``DevicePlugins``."""
        endpoint = self._endpoint("allocate devices of", resource)
        try:
            return await endpoint.allocate(ids)
        except (PluginCallError, PluginAnswerError) as error:
            raise _failed(resource, "allocate devices of", endpoint.path, error) from None

    async def pre_start(self, resource: str, ids: tuple[str, ...]) -> None:
        """Make a plugin prepare the devices of a container; see ``DevicePlugins``."""
        endpoint = self._endpoint("prepare devices of", resource)
        try:
            await endpoint.pre_start(ids)
        except (PluginCallError, PluginAnswerError) as error:
            raise _failed(resource, "prepare devices of", endpoint.path, error) from None

    def _endpoint(self, action: str, resource: str) -> PluginEndpoint:
        managed = self._resources.get(resource)
        if managed is None:
            raise DevicePluginError(
                resource, f"cannot {action} {resource}: no device plugin has registered it"
            )
        return managed.endpoint

    # -- the status ---------------------------------------------------------------------------------------

    def page(self) -> list[dict[str, object]]:
        """Return the resources as plain data."""
        return [self._row(name, each) for name, each in sorted(self._resources.items())]

    def _row(self, resource: str, managed: ManagedResource) -> dict[str, object]:
        endpoint, devices = managed.endpoint, managed.reported or {}
        return {
            "resource": resource,
            "socket": str(endpoint.path),
            "state": endpoint.state.value,
            "reason": endpoint.reason,
            "since_s": round(self._loop.time() - managed.since, 1),
            "devices": len(devices),
            "healthy": sum(device.healthy for device in devices.values()),
            "withdrawn": managed.reported is None and endpoint.devices is not None,
            "preference": endpoint.has_preferences,
            "preStart": endpoint.needs_pre_start,
            "registered": managed.registered,
        }


def _failed(resource: str, action: str, path: Path, error: Exception) -> DevicePluginError:
    return DevicePluginError(resource, f"cannot {action} {resource}: the device plugin at {path}: {error}")
