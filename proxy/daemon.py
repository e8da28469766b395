"""The composition root: the one place where the parts of the daemon are made and connected.

Start-up is ordered so that the socket exists as early as possible: ``early_socket`` opens it before this
module is imported. Modules that only some configurations need are imported inside functions. While the daemon
starts, it reconciles with the runtime; calls that need a decision wait for this, all others pass at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from proxy import logs, memory_trim
from proxy.admin.server import AdminServer
from proxy.admin_routes import Pages
from proxy.config.files import exposed_files
from proxy.config.schema import Config
from proxy.early_socket import EarlySocket, open_socket
from proxy.engine.suppression import SUPPRESSION_RECORD
from proxy.executor.background import TimeSlices, run_with_restarts
from proxy.executor.shutdown import CLOSE_S, ShutdownTime
from proxy.frontends.cri.acceptor import Acceptor
from proxy.model.mode import NodeMode
from proxy.notify import SystemdNotifier
from proxy.process_upkeep import keep_memory_small, ping_watchdog
from proxy.release.on_demand import LazyRelease
from proxy.reload.service import Reload
from proxy.reload.steps import (
    common_steps,
    device_plugins_step,
    executor_steps,
    hooks_step,
    suppression_step,
)
from proxy.sockets.unix_socket import Listener, copy_owner_and_mode
from proxy.staging.on_demand import PASSTHROUGH_ACTIONS, PASSTHROUGH_ROUTES, LazyStaging
from proxy.succession.replacement import DaemonReplacement, wait_quiet
from proxy.takeover.on_demand import LazyTakeover

if TYPE_CHECKING:
    from proxy.calls.call_flow import CallFlow
    from proxy.executor.best_effort.suppression import Suppression
    from proxy.executor.call_tracker import CallTracker
    from proxy.executor.former_calls import RelayedCall
    from proxy.executor.kernel_ports import Cgroups
    from proxy.executor.node_executor import NodeExecutor
    from proxy.executor.reconciler import Reconciler
    from proxy.executor.runtime_sync import RuntimeSync
    from proxy.frontends.cri.client_watch import ClientWatch
    from proxy.frontends.device_registration.service import DevicePluginService
    from proxy.frontends.podresources.service import PodResourcesService
    from proxy.hooks_setup import DaemonHooks
    from proxy.model.machine import Machine
    from proxy.state_directory import StateDirectory
    from proxy.succession.predecessor import Predecessor
    from proxy.succession.successor import Successor
    from proxy.telemetry.port import Telemetry

SETTLE_LIMIT_S = 3.0
"""Seconds that a stop may take to send the runtime the CPUs that BE (best effort) containers got back."""
DRAIN_GRACE_S = 0.2
"""Seconds after ``drainTimeout`` for the last connections to be closed."""
QUIET_WAIT_S, GOAWAY_S = 5.0, 1.0
"""Seconds to wait, before a successor takes over, for a moment without calls that place containers; and
seconds for clients to learn that they must connect again."""
PLACING_CALLS_S = 5.0
"""The most seconds (or ``drainTimeout``) for placing calls to end; new calls wait until then."""
RELAY_AFTER_REPLACED_S = 900.0
"""Seconds for which other calls may continue in a daemon that has been replaced."""
STOP_S = 4.0
"""Seconds that the shutdown may take after ``drainTimeout``, whatever hangs."""


SERVER_S, SUPPRESSION_S, HOOKS_S = 1.0, 5.2, 10.0
"""The most seconds for each server, BE suppression and hooks to stop; fewer if less time is left."""
EXECUTOR_S, WORKERS_S = 1.5, 1.2
"""The least seconds that are kept for closing the executor and the other workers."""


class Daemon:
    """The daemon: the proxy and the parts around it."""

    def __init__(
        self,
        config: Config,
        *,
        machine: Machine | None = None,
        cgroups: Cgroups | None = None,
        notifier: SystemdNotifier | None = None,
        early: EarlySocket | None = None,
    ) -> None:
        """Prepare a daemon; nothing is touched until ``start``.

        Args:
            config: The configuration.
            machine: The hardware; read from ``sysfsRoot`` by default.
            cgroups: The cpuset tree; found below ``cgroupRoot`` by default.
            notifier: Reports readiness; by default to systemd, if it runs the daemon.
            early: The socket, if it is already open.
        """
        self._config = config
        self._machine = machine
        self._cgroups = cgroups
        self._notifier = notifier or SystemdNotifier()
        self._early = early
        self._telemetry: Telemetry | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._listener: Listener | None = None
        self._state_directory: StateDirectory | None = None
        self._acceptor: Acceptor | None = None
        self._admin: AdminServer | None = None
        self.executor: NodeExecutor | None = None
        self.reconciler: Reconciler | None = None
        self.pages: Pages | None = None
        self._runtime_sync: RuntimeSync | None = None
        self._call_tracker: CallTracker | None = None
        self._takeover: LazyTakeover | None = None
        self._suppression: Suppression | None = None
        self._release: LazyRelease | None = None
        self._staging: LazyStaging | None = None
        self._flow: CallFlow | None = None
        self.hooks: DaemonHooks | None = None
        self._pod_resources: PodResourcesService | None = None
        self._device_plugins: DevicePluginService | None = None
        self.reload: Reload | None = None
        self._reload_wanted = asyncio.Event()
        self._predecessor: Predecessor | None = None
        self.replacement = DaemonReplacement()

    @property
    def config(self) -> Config:
        """The configuration in effect."""
        return self._config if self.reload is None else self.reload.config

    # -- start --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the socket and begin to serve.

        Raises:
            TopoproxyError: A required part is missing; everything opened so far is closed.
        """
        try:
            await self._start()
        except BaseException:
            await self._shut_down()
            raise

    async def _start(self) -> None:
        early, self._early = self._early or open_socket(self.config, self._machine), None
        self._predecessor = early.predecessor
        machine, self._listener = early.machine, early.listener
        self._config = config = early.config
        self._telemetry = telemetry = logs.telemetry()
        memory_trim.keep_large_blocks()
        if config.mode is NodeMode.PASSTHROUGH:
            report, resolved = telemetry.problem, telemetry.resolved
            self._acceptor = Acceptor(str(config.runtime), _RelayOnly(), (), report=report, resolved=resolved)
        else:
            self._acceptor = await self._build_node(machine, telemetry)
        self.reload = self._build_reload(machine, telemetry)
        self.reload.report_notices([*early.notices, *exposed_files(config)])
        memory_trim.freeze_modules()
        await self._acceptor.start(self._listener.socket)
        await self._start_admin()
        self._run_in_background(self._keep_socket_mode)
        health = None if self.executor is None else self.executor.health
        self._run_in_background(lambda: ping_watchdog(self._notifier, health, self._status))
        self._run_in_background(self._reload_on_request)
        self._run_in_background(self._watch_endpoint)
        if self.executor is not None:
            self._run_in_background(self._client_watch(self.executor, self._acceptor).run)
            self._run_in_background(self.executor.health.run)
            self._run_in_background(partial(keep_memory_small, self.executor))
        self._notifier.ready(self._status())
        telemetry.event("listening", path=self._listener.path, runtime=config.runtime, mode=config.mode)

    async def _build_node(self, machine: Machine, telemetry: Telemetry) -> Acceptor:
        from proxy.assembly import executor_of
        from proxy.frontends.cri.call import METHODS, CriCallFlow
        from proxy.state_directory import StateDirectory

        config = self.config
        self._state_directory = state = StateDirectory(config.state_dir, machine.fingerprint)
        entries = state.entries
        self.executor = executor = executor_of(
            config,
            machine,
            self._cgroups,
            state.ledger,
            entries,
            reread=self._machine is None,
            telemetry=telemetry,
        )
        self._expect_former_calls(executor)
        for note in state.notes:
            telemetry.problem("notice at start-up", reason=note)
        self._takeover = LazyTakeover(config, executor, state.ledger)
        self._call_tracker, self.reconciler, self._runtime_sync = (
            executor.call_tracker,
            executor.reconciler,
            executor.runtime_sync,
        )
        await TimeSlices().through(executor.recovery.recovering(entries))
        if not config.hooks.owned_cpus:
            executor.overrides.withdraw_extra_cpus()
        self._run_in_background(self.reconciler.run)
        self._run_in_background(self._runtime_sync.run)
        self._run_in_background(self.executor.unit_properties.run)
        self._start_suppression(config, entries.get(SUPPRESSION_RECORD))
        self._release = LazyRelease(config, executor, lambda: self._suppression)
        self._release.recover(entries)
        self._staging = LazyStaging(executor)
        self._run_in_background(self._staging.run)
        self._flow = flow = CriCallFlow(executor)
        if config.mode is NodeMode.ENFORCE:
            self._start_hooks()
        if config.pod_resources.serve is not None:
            self._run_in_background(self._serve_pod_resources)
        if config.device_plugins.enabled:
            self._serve_device_plugins()
        return Acceptor(
            str(config.runtime),
            flow,
            METHODS,
            report=telemetry.problem,
            resolved=telemetry.resolved,
            fault=executor.report_internal_error,
        )

    def _expect_former_calls(self, executor: NodeExecutor) -> None:
        """Pass the calls that the replaced daemon still relays, and their ends, to the executor."""
        predecessor, former = self._predecessor, executor.call_tracker.former_calls
        if predecessor is not None:
            former.possible = not predecessor.was_quiet
            former.expect(predecessor.relayed)
            if predecessor.relayed:
                predecessor.follow(former.over, former.all_over)

    async def _serve_pod_resources(self) -> None:
        """Serve the pod-resources API; its modules are imported in a thread, and only here."""
        from proxy.kubelet_assembly import pod_resources_of

        assert self.executor is not None
        if self._pod_resources is None:
            self._pod_resources = await asyncio.to_thread(pod_resources_of, self.config, self.executor)
        await self._pod_resources.run()

    def _serve_device_plugins(self) -> None:
        """Let device plugins register."""
        from proxy.kubelet_assembly import device_plugins_of

        assert self.executor is not None
        self._device_plugins = device_plugins_of(self.config, self.executor)
        self._run_in_background(self._device_plugins.run)

    def _start_suppression(self, config: Config, record: Mapping[str, Any] | None = None) -> None:
        """Begin BE suppression, if it is configured or an earlier run has left limits."""
        from proxy.assembly import suppression_of

        assert self.executor is not None
        self._suppression = suppression_of(config, self.executor, record)
        if self._suppression is not None:
            self._run_in_background(self._suppression.run)

    def _start_hooks(self) -> None:
        """Call hooks from now on, if they are configured; none are called for observed pods."""
        config, executor = self.config, self.executor
        if self.hooks is not None or not (config.hooks.enabled or config.hooks.serve is not None):
            return
        from proxy.hooks_setup import DaemonHooks

        assert executor is not None
        assert self._flow is not None
        marks = config.state_dir / "hooks"
        self.hooks = DaemonHooks(config.hooks, executor, self._flow, marks)
        if self.pages is not None:
            self.pages.show_hooks(self.hooks)
        self._run_in_background(self.hooks.run)
        self._run_in_background(self.hooks.serve)

    def _build_reload(self, machine: Machine, telemetry: Telemetry) -> Reload:
        steps, executor = common_steps(), self.executor
        if executor is None:
            return Reload(self._config, steps, lambda: machine, telemetry, self._notifier)
        steps += executor_steps(executor, self._start_hooks)
        steps.append(suppression_step(lambda: self._suppression, self._start_suppression))
        steps.append(hooks_step(lambda: self.hooks))
        steps.append(device_plugins_step(lambda: self._device_plugins))
        return Reload(self._config, steps, lambda: executor.state.node.machine, telemetry, self._notifier)

    def _client_watch(self, executor: NodeExecutor, acceptor: Acceptor) -> ClientWatch:
        from proxy.backends.kubelet.cri_endpoint import other_endpoints
        from proxy.frontends.cri.client_watch import ClientWatch

        directory, listen = self.config.kubelet.state_dir, self.config.listen
        return ClientWatch(
            acceptor,
            executor.telemetry,
            lambda: len(executor.state.pods),
            lambda: other_endpoints(directory, listen),
            executor.clock,
        )

    async def _watch_endpoint(self) -> None:
        """Watch kubelet's endpoint if ``topoproxy attach`` set it."""
        from proxy.attach.endpoint_watch import EndpointWatch, attached_kubelet

        assert self._telemetry is not None
        assert self.pages is not None
        watch = EndpointWatch(
            self._telemetry, lambda: attached_kubelet(self.config.state_dir, self.config.kubelet.state_dir)
        )
        self.pages.show_endpoint(watch)
        await watch.run()

    async def _start_admin(self) -> None:
        takeover = self._takeover or LazyTakeover(self.config, None, None)
        release = self._release or LazyRelease(self.config, None, lambda: None)
        self.pages = pages = Pages(
            self.config,
            self._listener,
            self._acceptor,
            self.executor,
            self.reconciler,
            lambda: self._suppression,
            self._takeover,
            self._release,
            self.hooks,
            self.reload,
            staging=self._staging,
            device_plugins=self._device_plugins,
        )
        routes = {**pages.routes(), **takeover.routes(), **release.routes()}
        routes["/successor"] = self.replacement.page
        actions = {**takeover.actions(), **release.actions()}
        routes |= self._staging.routes() if self._staging is not None else PASSTHROUGH_ROUTES
        actions |= self._staging.actions() if self._staging is not None else PASSTHROUGH_ACTIONS
        actions["/successor"] = self._start_succession
        if self.reload is not None:
            actions["/reload"] = self.reload.action
        if self.executor is not None:
            actions["/cluster/refresh"] = pages.refresh_cluster
        slow_routes = {*takeover.routes(), *pages.slow_routes}
        self._admin = AdminServer(self.config.admin_path, routes, actions, slow_routes=slow_routes)
        await self._admin.start()

    # -- run ----------------------------------------------------------------------------------------------

    def reload_soon(self) -> None:
        """Reload the configuration; if a start or another reload is running, reload after it."""
        self._reload_wanted.set()

    async def _reload_on_request(self) -> None:
        while self.reload is not None:
            await self._reload_wanted.wait()
            self._reload_wanted.clear()
            await self.reload.run("SIGHUP")

    def _run_in_background(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Run a coroutine as long as the daemon runs; a failure of it does not end the daemon."""
        self._tasks.append(asyncio.get_running_loop().create_task(run_with_restarts(begin, self._restarted)))

    def _restarted(self, error: BaseException) -> None:
        if self.executor is not None:
            self.executor.restarted(error)
        elif self._telemetry is not None:
            self._telemetry.fault(error)

    async def _keep_socket_mode(self) -> None:
        """Keep owner and mode of our socket like those of the runtime's socket, which may appear later."""
        while self._listener is not None and not self._listener.adopted:
            if self._listener.is_in_place:
                copy_owner_and_mode(self._listener.path, self.config.runtime)
            elif self.executor is not None:
                self.executor.telemetry.problem(
                    "the socket was removed: no client can connect (restart)", path=self._listener.path
                )
            await asyncio.sleep(5)

    def _status(self) -> str:
        listening = self._listener.path if self._listener is not None else self.config.listen
        return f"listening on {listening}, relaying to {self.config.runtime}"

    # -- succession ---------------------------------------------------------------------------------------

    def _start_succession(self) -> str:
        assert self._listener is not None
        return self.replacement.start(self._listener)

    async def hand_over(self, is_stopping: Callable[[], bool]) -> bool:
        """Hand the socket and the state of the node over to the successor.

        Calls that place containers end before the hand-over; the others continue in this daemon, which only
        relays them.

        Args:
            is_stopping: Returns whether a signal to stop this daemon has arrived.

        Returns:
            False if the successor has ended, or this daemon has to stop; it then serves as before.

        Raises:
            TopoproxyError: The successor does not serve.
        """
        successor = self.replacement.successor
        assert successor is not None
        assert self._acceptor is not None
        assert self._listener is not None
        await wait_quiet(lambda: self._is_busy() and not is_stopping(), QUIET_WAIT_S)
        if self.replacement.discard_ended() or is_stopping():
            return False
        clock = asyncio.get_running_loop().time
        began = clock()
        await self._acceptor.retire(GOAWAY_S)
        await wait_quiet(self._acceptor.is_placing, min(self.config.drain_timeout, PLACING_CALLS_S))
        quiet = await wait_quiet(self._is_busy, GOAWAY_S)
        if is_stopping():
            return False
        relayed = self._stop_deciding(successor)
        for task in self._tasks:
            task.cancel()
        self._listener.hand_over()
        await self._shut_down(handing_over=True)
        self._notifier.main_process(successor.pid)
        await asyncio.to_thread(successor.take_over, quiet=quiet, calls=relayed)
        successor.follow()
        if self._telemetry is not None:
            self._telemetry.event("replaced", pid=successor.pid, seconds=f"{clock() - began:.3f}")
        return True

    def _stop_deciding(self, successor: Successor) -> list[RelayedCall]:
        """Stop deciding; return the calls whose ends the successor has to know."""
        if self._flow is None or self._acceptor is None or self._call_tracker is None:
            return []
        former = self._call_tracker.former_calls
        former.report_ends_to(successor.over)
        relayed = self._flow.hand_over(self._acceptor.refuse_undecided, self._acceptor.calls, successor.over)
        return [*relayed, *former.relayed]

    def _is_busy(self) -> bool:
        """Return whether a client or the daemon itself has a placing call in flight."""
        assert self._acceptor is not None
        return self._acceptor.is_placing() or bool(self.executor and self.executor.state.inflight.calls)

    async def finish_calls(self, limit_s: float = RELAY_AFTER_REPLACED_S) -> None:
        """Relay the calls in flight to their end, and the reports about calls of an earlier daemon."""
        if self._acceptor is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s + DRAIN_GRACE_S):
                    await self._acceptor.drain(limit_s)
                    if self._call_tracker is not None:
                        await self._call_tracker.former_calls.wait()

    # -- stop ---------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Let calls in flight end (with a limit), then stop.

        Containers keep their cpusets, unless a stop has to release them.
        """
        self._notifier.stopping("draining")
        if self._acceptor is not None:
            self._acceptor.stop_accepting()
        if self._listener is not None:
            self._listener.close(keep_lock=True)
        limit, loop = self.config.drain_timeout, asyncio.get_running_loop()
        until = loop.time() + limit + STOP_S  # hooks may use the time that calls in flight do not need
        release = self._release if self.config.release_at_stop else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit + DRAIN_GRACE_S):
                await asyncio.gather(
                    *([self._acceptor.drain(limit)] if self._acceptor is not None else []),
                    *([release.at_stop(limit)] if release is not None else []),
                )
        await self._shut_down(until - loop.time())

    async def _shut_down(self, seconds: float = STOP_S, *, handing_over: bool = False) -> None:
        """End everything within this many seconds; do not wait for a part that hangs.

        Args:
            seconds: How long the shutdown may take.
            handing_over: Whether a successor continues, so that BE pods keep their limits.
        """
        telemetry = self._telemetry or logs.telemetry()
        ending = ShutdownTime(max(seconds, STOP_S), telemetry.warning)
        for task in self._tasks:
            task.cancel()
        await ending.step("end tasks", asyncio.gather(*self._tasks, return_exceptions=True))
        for server in (
            self._admin,
            self._pod_resources,
            self._device_plugins,
            self._release,
            self.hooks,
        ):
            if server is not None:
                max_seconds = HOOKS_S if server is self.hooks else SERVER_S
                await ending.step(
                    "end the servers", server.stop(), min(max_seconds, ending.remaining() - EXECUTOR_S)
                )
        if self.executor is not None:
            if self._suppression is not None and not handing_over:
                max_seconds = min(SUPPRESSION_S, ending.remaining() - EXECUTOR_S)
                await ending.step("restore the limits of BE pods", self._suppression.stop(), max_seconds)
                if self._runtime_sync is not None:
                    max_seconds = min(SETTLE_LIMIT_S, ending.remaining() - EXECUTOR_S)
                    await ending.step(
                        "update the runtime", self._runtime_sync.finish(SETTLE_LIMIT_S), max_seconds
                    )
            limit = max(EXECUTOR_S, min(CLOSE_S, ending.remaining() - WORKERS_S))
            await self.executor.close(limit, handing_over=handing_over)
            parts = (
                self.reconciler,
                self._runtime_sync,
                self._call_tracker,
                self._suppression,
                self._takeover,
                self._release,
                self._staging,
            )
            closing = (asyncio.to_thread(part.close) for part in (*parts, self.executor.runtime) if part)
            await ending.step("end the workers", asyncio.gather(*closing), WORKERS_S, min_seconds=WORKERS_S)
        if self._state_directory is not None:
            self._state_directory.close()
        if self._listener is not None:
            self._listener.close()
        if self._predecessor is not None and not handing_over:
            self._predecessor.close()


class _RelayOnly:
    """The interceptor of a proxy that only relays."""

    def request(self, call: object) -> None:
        """Never called: nothing is intercepted."""

    def response(self, call: object, message: bytes) -> None:
        """Never called."""

    def anomaly(self, path: str, kind: object) -> None:
        """Never called."""

    def finished(self, call: object, status: int | None) -> None:
        """Never called."""
