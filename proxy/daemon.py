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
from proxy.daemon_handover import DRAIN_GRACE_S, RELAY_AFTER_REPLACED_S, finish_calls, hand_over
from proxy.daemon_parts import DaemonParts
from proxy.daemon_shutdown import STOP_S, shut_down
from proxy.early_socket import EarlySocket, open_socket
from proxy.engine.suppression import SUPPRESSION_RECORD
from proxy.executor.background import TimeSlices, run_with_restarts
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
from proxy.sockets.unix_socket import copy_owner_and_mode
from proxy.staging.on_demand import PASSTHROUGH_ACTIONS, PASSTHROUGH_ROUTES, LazyStaging
from proxy.succession.replacement import DaemonReplacement
from proxy.takeover.on_demand import LazyTakeover

if TYPE_CHECKING:
    from proxy.executor.kernel_ports import Cgroups
    from proxy.executor.node_executor import NodeExecutor
    from proxy.frontends.cri.client_watch import ClientWatch
    from proxy.model.machine import Machine
    from proxy.telemetry.port import Telemetry


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
        self._reload_wanted = asyncio.Event()
        self.parts = DaemonParts()
        self.replacement = DaemonReplacement()

    @property
    def config(self) -> Config:
        """The configuration in effect."""
        return self._config if self.parts.reload is None else self.parts.reload.config

    @property
    def executor(self) -> NodeExecutor | None:
        """The node; None in mode ``passthrough``."""
        return self.parts.executor

    # -- start --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the socket and begin to serve.

        Raises:
            TopoproxyError: A required part is missing; everything opened so far is closed.
        """
        try:
            await self._start()
        except BaseException:
            await shut_down(self.parts)
            raise

    async def _start(self) -> None:
        parts = self.parts
        early, self._early = self._early or open_socket(self.config, self._machine), None
        parts.predecessor = early.predecessor
        machine, parts.listener = early.machine, early.listener
        self._config = config = early.config
        parts.telemetry = telemetry = logs.telemetry()
        memory_trim.keep_large_blocks()
        if config.mode is NodeMode.PASSTHROUGH:
            report, resolved = telemetry.problem, telemetry.resolved
            parts.acceptor = Acceptor(str(config.runtime), _RelayOnly(), (), report=report, resolved=resolved)
        else:
            parts.acceptor = await self._build_node(machine, telemetry)
        parts.reload = self._build_reload(machine, telemetry)
        parts.reload.report_notices([*early.notices, *exposed_files(config)])
        memory_trim.freeze_modules()
        await parts.acceptor.start(parts.listener.socket)
        await self._start_admin()
        self._run_in_background(self._keep_socket_mode)
        health = None if parts.executor is None else parts.executor.health
        self._run_in_background(lambda: ping_watchdog(self._notifier, health, self._status))
        self._run_in_background(self._reload_on_request)
        self._run_in_background(self._watch_endpoint)
        if parts.executor is not None:
            self._run_in_background(self._client_watch(parts.executor, parts.acceptor).run)
            self._run_in_background(parts.executor.health.run)
            self._run_in_background(partial(keep_memory_small, parts.executor))
        self._notifier.ready(self._status())
        telemetry.event("listening", path=parts.listener.path, runtime=config.runtime, mode=config.mode)

    async def _build_node(self, machine: Machine, telemetry: Telemetry) -> Acceptor:
        from proxy.assembly import executor_of
        from proxy.frontends.cri.call import METHODS, CriCallFlow
        from proxy.state_directory import StateDirectory

        parts = self.parts
        config = self.config
        parts.state_directory = state = StateDirectory(config.state_dir, machine.fingerprint)
        entries = state.entries
        parts.executor = executor = executor_of(
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
        parts.takeover = LazyTakeover(config, executor, state.ledger)
        parts.call_tracker, parts.reconciler, parts.runtime_sync = (
            executor.call_tracker,
            executor.reconciler,
            executor.runtime_sync,
        )
        await TimeSlices().through(executor.recovery.recovering(entries))
        if not config.hooks.owned_cpus:
            executor.overrides.withdraw_extra_cpus()
        self._run_in_background(parts.reconciler.run)
        self._run_in_background(parts.runtime_sync.run)
        self._run_in_background(parts.executor.unit_properties.run)
        self._start_suppression(config, entries.get(SUPPRESSION_RECORD))
        parts.release = LazyRelease(config, executor, lambda: parts.suppression)
        parts.release.recover(entries)
        parts.staging = LazyStaging(executor)
        self._run_in_background(parts.staging.run)
        parts.call_flow = flow = CriCallFlow(executor)
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
        predecessor, former = self.parts.predecessor, executor.call_tracker.former_calls
        if predecessor is not None:
            former.possible = not predecessor.was_quiet
            former.expect(predecessor.relayed)
            if predecessor.relayed:
                predecessor.follow(former.over, former.all_over)

    async def _serve_pod_resources(self) -> None:
        """Serve the pod-resources API; its modules are imported in a thread, and only here."""
        from proxy.kubelet_assembly import pod_resources_of

        parts = self.parts
        assert parts.executor is not None
        if parts.pod_resources is None:
            parts.pod_resources = await asyncio.to_thread(pod_resources_of, self.config, parts.executor)
        await parts.pod_resources.run()

    def _serve_device_plugins(self) -> None:
        """Let device plugins register."""
        from proxy.kubelet_assembly import device_plugins_of

        parts = self.parts
        assert parts.executor is not None
        parts.device_plugins = device_plugins_of(self.config, parts.executor)
        self._run_in_background(parts.device_plugins.run)

    def _start_suppression(self, config: Config, record: Mapping[str, Any] | None = None) -> None:
        """Begin BE suppression, if it is configured or an earlier run has left limits."""
        from proxy.assembly import suppression_of

        parts = self.parts
        assert parts.executor is not None
        parts.suppression = suppression_of(config, parts.executor, record)
        if parts.suppression is not None:
            self._run_in_background(parts.suppression.run)

    def _start_hooks(self) -> None:
        """Call hooks from now on, if they are configured; none are called for observed pods."""
        parts = self.parts
        config, executor = self.config, parts.executor
        if parts.hooks is not None or not (config.hooks.enabled or config.hooks.serve is not None):
            return
        from proxy.hooks_setup import DaemonHooks

        assert executor is not None
        assert parts.call_flow is not None
        marks = config.state_dir / "hooks"
        parts.hooks = DaemonHooks(config.hooks, executor, parts.call_flow, marks)
        self._run_in_background(parts.hooks.run)
        self._run_in_background(parts.hooks.serve)

    def _build_reload(self, machine: Machine, telemetry: Telemetry) -> Reload:
        parts = self.parts
        steps, executor = common_steps(), parts.executor
        if executor is None:
            return Reload(self._config, steps, lambda: machine, telemetry, self._notifier)
        steps += executor_steps(executor, self._start_hooks)
        steps.append(suppression_step(lambda: parts.suppression, self._start_suppression))
        steps.append(hooks_step(lambda: parts.hooks))
        steps.append(device_plugins_step(lambda: parts.device_plugins))
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

        parts = self.parts
        assert parts.telemetry is not None
        assert parts.pages is not None
        watch = EndpointWatch(
            parts.telemetry,
            lambda: attached_kubelet(self.config.state_dir, self.config.kubelet.state_dir),
        )
        parts.pages.show_endpoint(watch)
        await watch.run()

    async def _start_admin(self) -> None:
        parts = self.parts
        takeover = parts.takeover or LazyTakeover(self.config, None, None)
        release = parts.release or LazyRelease(self.config, None, lambda: None)
        parts.pages = pages = Pages(self.config, parts)
        routes = {**pages.routes(), **takeover.routes(), **release.routes()}
        routes["/successor"] = self.replacement.page
        actions = {**takeover.actions(), **release.actions()}
        routes |= parts.staging.routes() if parts.staging is not None else PASSTHROUGH_ROUTES
        actions |= parts.staging.actions() if parts.staging is not None else PASSTHROUGH_ACTIONS
        actions["/successor"] = self._start_succession
        if parts.reload is not None:
            actions["/reload"] = parts.reload.action
        if parts.executor is not None:
            actions["/cluster/refresh"] = pages.refresh_cluster
        slow_routes = {*takeover.routes(), *pages.slow_routes}
        parts.admin = AdminServer(self.config.admin_path, routes, actions, slow_routes=slow_routes)
        await parts.admin.start()

    # -- run ----------------------------------------------------------------------------------------------

    def reload_soon(self) -> None:
        """Reload the configuration; if a start or another reload is running, reload after it."""
        self._reload_wanted.set()

    async def _reload_on_request(self) -> None:
        while self.parts.reload is not None:
            await self._reload_wanted.wait()
            self._reload_wanted.clear()
            await self.parts.reload.run("SIGHUP")

    def _run_in_background(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Run a coroutine as long as the daemon runs; a failure of it does not end the daemon."""
        self.parts.tasks.append(
            asyncio.get_running_loop().create_task(run_with_restarts(begin, self._restarted))
        )

    def _restarted(self, error: BaseException) -> None:
        parts = self.parts
        if parts.executor is not None:
            parts.executor.restarted(error)
        elif parts.telemetry is not None:
            parts.telemetry.fault(error)

    async def _keep_socket_mode(self) -> None:
        """Keep owner and mode of our socket like those of the runtime's socket, which may appear later."""
        parts = self.parts
        while parts.listener is not None and not parts.listener.adopted:
            if parts.listener.is_in_place:
                copy_owner_and_mode(parts.listener.path, self.config.runtime)
            elif parts.executor is not None:
                parts.executor.telemetry.problem(
                    "the socket was removed: no client can connect (restart)", path=parts.listener.path
                )
            await asyncio.sleep(5)

    def _status(self) -> str:
        listening = self.parts.listener.path if self.parts.listener is not None else self.config.listen
        return f"listening on {listening}, relaying to {self.config.runtime}"

    # -- succession ---------------------------------------------------------------------------------------

    def _start_succession(self) -> str:
        assert self.parts.listener is not None
        return self.replacement.start(self.parts.listener)

    async def hand_over(self, is_stopping: Callable[[], bool]) -> bool:
        """Hand over to the successor that has prepared; see ``proxy.daemon_handover``."""
        drain_timeout_s = self.config.drain_timeout
        return await hand_over(self.parts, self.replacement, self._notifier, drain_timeout_s, is_stopping)

    async def finish_calls(self, limit_s: float = RELAY_AFTER_REPLACED_S) -> None:
        """Relay the calls in flight to their end, after a successor has taken over."""
        await finish_calls(self.parts, limit_s)

    # -- stop ---------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Let calls in flight end (with a limit), then stop.

        Containers keep their cpusets, unless a stop has to release them.
        """
        parts = self.parts
        self._notifier.stopping("draining")
        if parts.acceptor is not None:
            parts.acceptor.stop_accepting()
        if parts.listener is not None:
            parts.listener.close(keep_lock=True)
        limit, loop = self.config.drain_timeout, asyncio.get_running_loop()
        until = loop.time() + limit + STOP_S  # hooks may use the time that calls in flight do not need
        release = parts.release if self.config.release_at_stop else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit + DRAIN_GRACE_S):
                await asyncio.gather(
                    *([parts.acceptor.drain(limit)] if parts.acceptor is not None else []),
                    *([release.at_stop(limit)] if release is not None else []),
                )
        await shut_down(parts, until - loop.time())


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
