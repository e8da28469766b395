"""One registered device plugin: its device list, the calls to it, and its isolation if it fails repeatedly.

A plugin that has registered is queried for its options, then its device list is followed. kubelet drops a
plugin whose list ends, and waits until it registers again (kubernetes v1.36
pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go, runClient). Here its socket is dialled again, with
growing pauses, until the plugin registers again or its grace period is over. The states:

- ``CONNECTING``: the plugin has not listed its devices yet. Calls wait for the list as long as for an
  answer.
- ``SERVING``: its devices can be assigned.
- ``DOWN``: its list has ended, or could not be used.
- ``ISOLATED``: it lists its devices, but several calls in a row had no usable answer. It is queried for its
  options, with growing pauses, until it answers.

If a plugin answers with an error, that is its decision, and counts as an answer. A preference is not
binding: if a plugin does not give it in time, the only consequence is that it is not queried for one for a
while.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar

from proxy.allocation.devices.state import RegisteredDevice
from proxy.backends.device_plugins import messages
from proxy.backends.device_plugins.messages import PluginAnswerError
from proxy.backends.device_plugins.plugin_channel import PluginCallError, PluginChannel
from proxy.executor.background import Worker
from proxy.model.backoff import Backoff, RetryDelays, RetryTimes
from proxy.model.devices import AllocateAnswer
from proxy.telemetry import metrics
from proxy.telemetry.port import Telemetry

RECONNECT_BACKOFF: Final = Backoff(0.2, 30.0, steady=60.0)
"""Seconds before a plugin whose list has ended is dialled again."""
PROBE_BACKOFF: Final = Backoff(1.0, 60.0, steady=300.0)
"""Seconds before an isolated plugin is queried again."""
PREFERENCE_BACKOFF: Final = Backoff(10.0, 300.0)
"""Seconds for which a plugin that did not give a usable preference is not queried for one."""
FAILURES_LIMIT: Final = 3
"""This many calls in a row without a usable answer isolate a plugin."""
PREFERENCE_LIMIT_S: Final = 2.0
"""The longest deadline of a request for a preference."""
PRE_START_S: Final = 30.0
"""The deadline of PreStartContainer (k8s.io/kubelet v0.36 pkg/apis/deviceplugin/v1beta1/constants.go)."""
LIST_GAP_S: Final = 0.1
"""Seconds between two lists of a plugin that are read; of the lists that arrive in between, only the newest
is read."""

T = TypeVar("T")


class EndpointState(StrEnum):
    """The state of a plugin; see the docstring of this module."""

    CONNECTING = "connecting"
    SERVING = "serving"
    DOWN = "down"
    ISOLATED = "isolated"


class PluginEndpoint:
    """A plugin that has registered; for the event loop.

    Attributes:
        resource: The resource that it has registered.
        path: Its socket.
        state: Its state.
        reason: Why it does not serve; empty if it does.
        devices: Its newest list; None before the first list.
        has_preferences: Whether it answers GetPreferredAllocation.
        needs_pre_start: Whether the plugin requires PreStartContainer.
    """

    def __init__(
        self,
        resource: str,
        path: Path,
        decoder: Worker,
        timeout: Callable[[], float],
        telemetry: Telemetry,
        changed: Callable[[PluginEndpoint], None],
    ) -> None:
        """Store the settings; nothing is dialled yet.

        Args:
            resource: The resource that the plugin has registered.
            path: Its socket.
            decoder: The thread that decodes device lists.
            timeout: Returns the deadline of a call, in seconds.
            telemetry: Counts calls and lists.
            changed: Called when its state or its devices have changed.
        """
        self.resource, self.path = resource, path
        self.state = EndpointState.CONNECTING
        self.reason = "it has not listed its devices yet"
        self.devices: Mapping[str, RegisteredDevice] | None = None
        self.has_preferences, self.needs_pre_start = False, False
        self._decoder = decoder
        self._timeout = timeout
        self._telemetry = telemetry
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._channel = PluginChannel(path)
        self._failures = 0
        self._served_since = 0.0
        self._first_list = asyncio.Event()  # set even if there is no list: see ``reason``
        self._probes = RetryDelays(PROBE_BACKOFF)
        self._preferences = RetryTimes[str](PREFERENCE_BACKOFF)
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    # -- its connection -----------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Query the plugin for its options.

        Raises:
            PluginCallError: The plugin does not answer, or answers with an error.
            PluginAnswerError: Its answer cannot be used.
        """
        content = await self._call("GetDevicePluginOptions", b"", self._timeout())
        self.has_preferences, self.needs_pre_start = messages.read_options(content)

    async def run(self) -> None:
        """Follow the devices of the plugin, until the task is cancelled."""
        pauses, again = RetryDelays(RECONNECT_BACKOFF), False
        while True:
            began = self._loop.time()
            reason = await self._session(again=again)
            self._cancel_tasks()
            self._channel.close()
            self._set_state(EndpointState.DOWN, reason)
            await asyncio.sleep(pauses.next(self._loop.time() - began))
            again = True

    def close(self) -> None:
        """End all calls; changes are no longer reported."""
        self._closed = True
        self._changed = lambda endpoint: None
        self._first_list.set()
        self._cancel_tasks()
        self._channel.close()

    async def _session(self, *, again: bool) -> str:
        """Follow the list, after connecting again if ``again``; return why the list has ended."""
        try:
            if again:
                self._channel = PluginChannel(self.path)
                await self.connect()
            return await self._follow()
        except (PluginCallError, PluginAnswerError) as error:
            return str(error)

    async def _follow(self) -> str:
        feed = ListFeed()
        self._channel.watch(feed.put, feed.end)
        late, counted = self._loop.call_later(self._timeout(), self._list_is_late), 0
        try:
            while (content := await feed.next()) is not None:
                late.cancel()
                received = feed.received
                self._telemetry.count(metrics.DEVICE_LISTS, received - counted)
                counted = received
                self._list_arrived(await self._decoder.run(messages.read_devices, content))
                await feed.pause(LIST_GAP_S)
            return feed.ended
        finally:
            late.cancel()

    def _list_arrived(self, devices: Mapping[str, RegisteredDevice]) -> None:
        self.devices = devices
        if self.state is EndpointState.ISOLATED:
            self._changed(self)
        else:
            if self.state is not EndpointState.SERVING:
                self._failures, self._served_since = 0, self._loop.time()
            self._set_state(EndpointState.SERVING, "")

    def _list_is_late(self) -> None:
        if self.state is EndpointState.CONNECTING:
            self._set_state(self.state, f"it has listed no devices within {self._timeout():g} s")

    def _set_state(self, state: EndpointState, reason: str) -> None:
        self.state, self.reason = state, reason
        self._first_list.set()
        self._changed(self)

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    # -- calls --------------------------------------------------------------------------------------------

    async def preferred(
        self, available: frozenset[str], must_include: frozenset[str], size: int
    ) -> tuple[str, ...]:
        """Request a preference; empty if the plugin has none, or does not answer with a usable one."""
        now = self._loop.time()
        if self.state is not EndpointState.SERVING or not self._preferences.due("", now):
            return ()
        request = messages.preference_request(available, must_include, size)
        limit = min(self._timeout(), PREFERENCE_LIMIT_S)
        try:
            content = await self._call("GetPreferredAllocation", request, limit)
            preference = messages.read_preference(content, available, size)
        except (PluginCallError, PluginAnswerError) as error:
            self._preferences.failed("", self._loop.time())
            self._telemetry.problem(
                "cannot use the preference of a device plugin", resource=self.resource, err=error
            )
            return ()
        self._preferences.succeeded("")
        return preference

    async def allocate(self, ids: tuple[str, ...]) -> AllocateAnswer:
        """Request the settings that a container needs to use devices.

        Raises:
            PluginCallError, PluginAnswerError: There is no usable answer.
        """
        request = messages.allocate_request(ids)
        return await self._call_when_serving("Allocate", request, self._timeout(), messages.read_allocation)

    async def pre_start(self, ids: tuple[str, ...]) -> None:
        """Make the plugin prepare devices for a container.

        Raises:
            PluginCallError, PluginAnswerError: There is no usable answer.
        """
        request = messages.pre_start_request(ids)
        await self._call_when_serving("PreStartContainer", request, PRE_START_S, lambda content: None)

    async def _call_when_serving(
        self, method: str, request: bytes, limit: float, read: Callable[[bytes], T]
    ) -> T:
        # This endpoint may have replaced an earlier one, whose devices are still assigned before the first
        # list.
        await self._first_list.wait()
        if self.state is not EndpointState.SERVING:
            raise PluginCallError(self.reason, answered=False)
        try:
            answer = read(await self._call(method, request, limit))
        except PluginCallError as error:
            self._failures = 0 if error.answered else self._failures + 1
            self._isolate_if_due(f"{method}: {error}")
            raise
        except PluginAnswerError as error:
            self._failures += 1
            self._isolate_if_due(f"{method}: {error}")
            raise
        self._failures = 0
        return answer

    async def _call(self, method: str, request: bytes, limit: float) -> bytes:
        self._telemetry.count(metrics.DEVICE_PLUGIN_CALLS, method=method)
        try:
            return await self._channel.call(method, request, limit)
        except PluginCallError:
            self._telemetry.count(metrics.DEVICE_PLUGIN_CALLS_FAILED, method=method)
            raise

    def _isolate_if_due(self, reason: str) -> None:
        if self._closed or self.state is not EndpointState.SERVING or self._failures < FAILURES_LIMIT:
            return
        self._telemetry.count(metrics.DEVICE_PLUGINS_ISOLATED)
        self._set_state(
            EndpointState.ISOLATED, f"{FAILURES_LIMIT} calls in a row had no usable answer ({reason})"
        )
        self._tasks.append(self._loop.create_task(self._probe()))

    async def _probe(self) -> None:
        """Query an isolated plugin for its options until it answers."""
        lasted = self._loop.time() - self._served_since
        while True:
            await asyncio.sleep(self._probes.next(lasted))
            try:
                await self.connect()
            except (PluginCallError, PluginAnswerError):
                lasted = 0.0
                continue
            break
        self._failures, self._served_since = 0, self._loop.time()
        self._set_state(EndpointState.SERVING, "")


class ListFeed:
    """Holds the newest list of a plugin. ``put`` is for the thread that reads, everything else for the loop.

    A list replaces all lists before it. If a newer list arrives before a list has been read, the older list
    is dropped, so that a plugin that sends lists without end costs no more than its newest list.

    Attributes:
        received: How many messages have arrived.
        ended: Why the stream has ended; empty until it ends.
    """

    def __init__(self) -> None:
        self.received = 0
        self.ended = ""
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._newest: bytes | None = None
        self._awake = asyncio.Event()
        self._over = asyncio.Event()

    def put(self, message: bytes) -> None:
        """Store a message; it replaces a message that has not been read."""
        self.received += 1
        with self._lock:
            waiting, self._newest = self._newest, message
        if waiting is None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._awake.set)

    def end(self, text: str) -> None:
        """Record that the stream has ended; a message that has not been read is dropped."""
        self.ended = text
        self._over.set()
        self._awake.set()

    async def next(self) -> bytes | None:
        """Wait for a message and return the newest one; None if the stream has ended."""
        while not self.ended:
            self._awake.clear()
            with self._lock:
                message, self._newest = self._newest, None
            if message is not None:
                return message
            await self._awake.wait()
        return None

    async def pause(self, seconds: float) -> None:
        """Let messages replace each other for a while; return early if the stream ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()
