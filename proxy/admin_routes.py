"""The pages of the admin socket that need the daemon's parts, such as status, explain and metrics.

What only some pages need is imported with the first request; a page that must be answered after a package has
replaced the files of the daemon imports it at the start (``proxy.replaced_files``).
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING

from proxy import __version__
from proxy.admin.server import Reply
from proxy.config.schema import Config
from proxy.engine.enforcement import applies_to
from proxy.engine.suppression import suppression_note
from proxy.executor.readiness import required_checks
from proxy.executor.status_data import node_page, suppression_page
from proxy.model import schema_ids
from proxy.model.errors import InputError, TopoproxyError
from proxy.model.mode import NodeMode
from proxy.observe.metrics import metrics
from proxy.public_interfaces import interface

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.admin.server import Route
    from proxy.attach.endpoint_watch import EndpointWatch
    from proxy.daemon_parts import DaemonParts
    from proxy.executor.change_feed import ChangeFeed
    from proxy.executor.decision_records import RememberedDecision
    from proxy.executor.node_executor import NodeExecutor
    from proxy.observe.device_assignments import KubeletDevices

CLUSTER_READ_S = 1.0
"""Seconds that the status waits for a new reading of the cluster agent's files."""


class Pages:
    """Answers requests about a daemon; parts that its mode does not have are None."""

    slow_routes = frozenset({"/status", "/changes", "/memory", "/devices", "/observe/report"})
    """Pages that wait for the kernel, a file or another program; they may take as long as an action."""

    def __init__(self, config: Config, parts: DaemonParts) -> None:
        self._config = config
        self._parts = parts
        self._endpoint: EndpointWatch | None = None
        self._started = time.monotonic()
        self._feed: ChangeFeed | None = None
        self._cluster_reading: asyncio.Future[None] | None = None

    @property
    def _mode(self) -> str:
        """The mode in effect."""
        return (self._config if self._parts.executor is None else self._parts.executor.state).mode.value

    def show_endpoint(self, endpoint: EndpointWatch) -> None:
        """Show from now on whether kubelet is attached, and whether its files still say so."""
        self._endpoint = endpoint

    def routes(self) -> dict[str, Route]:
        """Return the pages by path."""
        return {
            "/status": self.read_status,
            "/readyz": self.readyz,
            "/explain": self.explain,
            "/report": self.report,
            "/node": self.node,
            "/changes": self.changes,
            "/observe/report": self.observe_report,
            "/memory": self.memory,
            "/devices": self.devices,
            "/devices/capacity": self.device_capacity,
            "/hooks": self.hooks,
            "/interface": self.interface,
            "/metrics": self.metrics,
        }

    async def read_status(self) -> dict[str, object]:
        """Return the page of ``topoproxy status``, with the cpusets that the kernel has now.

        The page is needed most when something hangs: values that cannot be read in time are shown as they
        were, with their age.
        """
        parts = self._parts
        if parts.executor is not None:
            await parts.executor.kernel_view.refresh()
            await self._read_cluster(parts.executor)
        return self.status()

    def readyz(self) -> Reply:
        """Answer whether the daemon is ready for calls: one line for each check, as kube-apiserver does."""
        checks = self._checks()
        failed = {str(check["name"]): str(check["reason"]) for check in checks if not check["ok"]}
        names = [str(check["name"]) for check in checks]
        lines = [f"[-]{name} failed: {failed[name]}" if name in failed else f"[+]{name} ok" for name in names]
        return Reply(
            503 if failed else 200,
            "\n".join([*lines, f"readyz check {'failed' if failed else 'passed'}", ""]),
        )

    def _calls(self) -> dict[str, object]:
        """Return the seconds since the last call, and since the last one of each intercepted method."""
        parts = self._parts
        if parts.acceptor is None:
            return {}
        now, times = time.monotonic(), parts.acceptor.times
        clients = [
            {"pid": pid, "last_s": None if at is None else round(now - at, 1)}
            for pid, at in sorted(parts.acceptor.clients(), key=itemgetter(0))
        ]
        return {
            "clients": clients,
            "last_s": None if times.last is None else round(now - times.last, 1),
            "methods": {p.rpartition("/")[2]: round(now - at, 1) for p, at in sorted(times.by_path.items())},
        }

    def _checks(self) -> list[dict[str, object]]:
        """Return the checks that decide whether the daemon is ready."""
        parts = self._parts
        if parts.executor is None or parts.reconciler is None:
            down = (
                parts.acceptor is not None and parts.acceptor.is_down()
            ) or not self._config.runtime.is_socket()
            reason = f"cannot connect to the runtime at {self._config.runtime}" if down else ""
            return [{"name": "runtime", "ok": not down, "reason": reason, "required": True}]
        return [check.page() for check in required_checks(parts.executor, parts.reconciler)]

    def status(self) -> dict[str, object]:
        """Return the status with the cpusets that the kernel had at the last reading."""
        parts = self._parts
        config = self._config
        page: dict[str, object] = {
            "schema": schema_ids.STATUS,
            "version": __version__,
            "mode": self._mode,
            "pid": os.getpid(),
            "listen": str(parts.listener.path if parts.listener else config.listen),
            "clients": parts.acceptor.connections if parts.acceptor else 0,
            "calls": self._calls(),
            "uptime_s": round(time.monotonic() - self._started, 1),
            "runtime": {"endpoint": str(config.runtime), "connected": None, "version": ""},
        }
        if self._endpoint is not None and (attached := self._endpoint.page()):
            page["attach"] = attached
        if parts.reload is not None:
            page["config"] = parts.reload.page()
        if parts.executor is None:
            page["checks"] = checks = self._checks()
            page["ready"] = all(check["ok"] for check in checks)
        if parts.executor is not None and parts.reconciler is not None:
            page.update(node_page(parts.executor))
            page["runtime"] = {
                "endpoint": str(config.runtime),
                "connected": parts.reconciler.connected,
                "version": parts.reconciler.runtime_version,
                "reason": "" if parts.reconciler.connected else parts.reconciler.failure,
                "events": parts.executor.runtime_events.events_state.value,
                "reconcile_s": parts.executor.options.reconcile_period,
            }
            suppression, observed = (
                parts.suppression,
                parts.executor.state.mode is NodeMode.OBSERVE,
            )
            if suppression is not None and not observed:
                page["beSuppress"] = suppression_page(
                    suppression.known, suppression.settings, parts.executor.state
                )
            if parts.staging is not None:
                page["enforcement"] = parts.staging.page()
            if parts.takeover is not None:
                page.update(parts.takeover.page())
            if parts.release is not None:
                page.update(parts.release.page())
        if parts.device_plugins is not None:
            page["devicePlugins"] = parts.device_plugins.page()
        if parts.hooks is not None and (hooks := parts.hooks.page()):
            page["hooks"] = hooks
        return page

    def interface(self) -> dict[str, object]:
        """Return the facts that ``topoproxy upgrade --check`` of another version compares."""
        return interface(self._config if self._parts.reload is None else self._parts.reload.config)

    def hooks(self) -> dict[str, object]:
        """Return the page of ``topoproxy hooks list``."""
        if self._parts.hooks is None:
            why = (
                "hooks are off (hooks.enabled)"
                if self._mode == NodeMode.ENFORCE
                else "hooks need mode enforce"
            )
            return {"schema": schema_ids.HOOKS_LIST, "hooks": [], "note": why}
        return {"schema": schema_ids.HOOKS_LIST, "hooks": [], **self._parts.hooks.page()}

    def explain(self, params: Mapping[str, str]) -> dict[str, object]:
        """Return the page of ``topoproxy explain``."""
        from proxy.observe.explain_data import history_page

        if self._parts.executor is None:
            raise InputError("cannot explain: in passthrough mode nothing is decided")
        return history_page(self._parts.executor.history, params, self._change_note)

    def _change_note(self, record: RememberedDecision) -> str:
        """Return a sentence on what is now in effect for a container beyond its decision; usually empty."""
        parts = self._parts
        if parts.executor is None:
            return ""
        from proxy.engine.plan_differences import enforcement_change_note

        suppression, state, container_id = (
            parts.suppression,
            parts.executor.state,
            record.container_id,
        )
        if text := enforcement_change_note(state, container_id, applied=record.explanation.applied):
            return text
        if lacks := parts.executor.hotplug.hardware_losses.explained(container_id):
            return lacks
        container = state.containers.get(container_id)
        if suppression is None or container is None:
            return ""
        return suppression_note(suppression.known, suppression.settings, state, container)

    def report(self, params: Mapping[str, str]) -> dict[str, object]:
        """Return the page of ``topoproxy report``."""
        from proxy.observe.koordinator import node_resource_topology
        from proxy.observe.node_description import node_facts

        parts = self._parts
        if parts.executor is None:
            raise InputError("cannot report: in passthrough mode nothing is decided")
        if (form := params.get("format", "koordinator")) != "koordinator":
            raise InputError(f"cannot report: there is no format {form!r} (koordinator)")
        state, manager, meta = (
            parts.executor.state,
            parts.executor.kubelet_cpus.manager,
            parts.executor.node_policy.meta,
        )
        name = params.get("node") or (meta.name if meta else "") or socket.gethostname().lower()
        return node_resource_topology(state.node.machine, node_facts(state, name, manager, meta))

    def node(self, params: Mapping[str, str]) -> dict[str, object]:
        """Return the facts about the node that the cluster agent publishes, with ``changes``' version."""
        from proxy.observe.node_description import describe_node

        executor, feed = self._executor_and_feed()
        meta, state = executor.node_policy.meta, executor.state
        name = params.get("node") or (meta.name if meta else "") or socket.gethostname().lower()
        page = describe_node(state, name, executor.kubelet_cpus.manager, meta)
        rejections = executor.rejections.page(lambda pod: applies_to(state, pod))
        return page | {"version": feed.version, "rejections": rejections}

    async def changes(self, params: Mapping[str, str]) -> dict[str, object]:
        """Answer when something has changed since a version, or when the time is over."""
        try:
            wait = float(params.get("wait", "0"))
        except ValueError as error:
            raise InputError(f"cannot wait for a change: {params['wait'][:50]!r} is not a number") from error
        return await self._executor_and_feed()[1].page(params.get("since", ""), max(0.0, wait))

    def _executor_and_feed(self) -> tuple[NodeExecutor, ChangeFeed]:
        """Return the executor and the feed of its changes."""
        from proxy.executor.change_feed import ChangeFeed

        parts = self._parts
        if parts.executor is None:
            raise InputError("cannot follow the node: in passthrough mode nothing is decided")
        if self._feed is None:
            self._feed = ChangeFeed(parts.executor.store, parts.executor.telemetry)
        return parts.executor, self._feed

    async def observe_report(self) -> dict[str, object]:
        """Return the page of ``topoproxy observe report``."""
        if self._parts.executor is None:
            raise InputError("cannot compare a plan with the kernel: in passthrough mode there is none")
        from proxy.executor.plan_report import plan_report

        return await plan_report(self._parts.executor)

    async def memory(self) -> dict[str, object]:
        """Return the page of ``topoproxy status --memory``."""
        if self._parts.executor is None:
            raise InputError("cannot show where memory is: in passthrough mode it is not watched")
        return {"schema": schema_ids.STATUS_MEMORY, **await self._parts.executor.mems.page()}

    async def devices(self) -> dict[str, object]:
        """Return the daemon's part of ``topoproxy devices``: which container has which device."""
        from proxy.observe.device_assignments import assignments_page

        parts = self._parts
        kubelet = await asyncio.to_thread(_kubelet_devices, self._config.kubelet.pod_resources)
        if parts.executor is None:
            return assignments_page(kubelet, None, ())
        refused = [] if parts.device_plugins is None else parts.device_plugins.refused()
        history = parts.executor.history.with_devices()
        return assignments_page(kubelet, parts.executor.state, history, refused)

    def device_capacity(self) -> dict[str, object]:
        """Return the amounts of devices that topoproxy assigns, for the Node object."""
        from proxy.observe.device_capacity import capacity_page

        if self._parts.executor is None:
            raise InputError("cannot count devices: in passthrough mode none are assigned")
        return capacity_page(self._parts.executor.state)

    async def _read_cluster(self, executor: NodeExecutor) -> None:
        """Read the files of the cluster agent in a thread, so that the page shows their present content.

        A reading that hangs is not repeated: repeated readings would occupy one thread after the other, and
        calls that place containers need these threads.
        """
        if executor.cluster is None:
            return
        reading = self._cluster_reading
        if reading is None or reading.done():
            reading = executor.fact_lookup.worker.submit(executor.cluster.read)
            self._cluster_reading = reading
        await asyncio.wait((reading,), timeout=CLUSTER_READ_S)
        if reading.done():
            reading.result()

    async def refresh_cluster(self) -> dict[str, object]:
        """Reread the files of the cluster agent, apply them, and return what is in effect."""
        executor = self._parts.executor
        assert executor is not None
        if (files := executor.cluster) is None:
            raise InputError("cannot read what the cluster agent has read: clusterFacts.directory is not set")
        await executor.node_policy.refresh(executor.fact_lookup.worker)
        await executor.fact_lookup.worker.run(files.read)
        return {"schema": schema_ids.CLUSTER, "files": files.page()}

    def metrics(self) -> str:
        """Return the output of ``topoproxy status --metrics``: Prometheus' text format."""
        registry = None if self._parts.executor is None else self._parts.executor.telemetry.registry
        return metrics(self.status(), registry)


def _kubelet_devices(socket: Path | None) -> KubeletDevices:
    """Query kubelet for its devices; runs in a thread."""
    from proxy.observe.device_assignments import KubeletDevices

    if socket is None:
        return KubeletDevices(is_queried=False)
    from proxy.backends.kubelet.channel import UnixChannel
    from proxy.backends.kubelet.pod_resources import PodResources
    from proxy.backends.kubelet.shared_pod_resources import CALL_S

    channel = UnixChannel(str(socket), CALL_S)
    lists = PodResources(channel, time.monotonic)
    try:
        return KubeletDevices(is_queried=True, pods=lists.pods(), allocatable=lists.allocatable_resources())
    except TopoproxyError as error:
        return KubeletDevices(is_queried=True, problem=str(error))
    finally:
        channel.close()
