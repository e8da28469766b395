"""The parts of a running daemon, as its start, its hand-over and its shutdown use them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.admin.server import AdminServer
    from proxy.admin_routes import Pages
    from proxy.calls.call_flow import CallFlow
    from proxy.executor.best_effort.suppression import Suppression
    from proxy.executor.call_tracker import CallTracker
    from proxy.executor.node_executor import NodeExecutor
    from proxy.executor.reconciler import Reconciler
    from proxy.executor.runtime_sync import RuntimeSync
    from proxy.frontends.cri.acceptor import Acceptor
    from proxy.frontends.device_registration.service import DevicePluginService
    from proxy.frontends.podresources.service import PodResourcesService
    from proxy.hooks_setup import DaemonHooks
    from proxy.release.on_demand import LazyRelease
    from proxy.reload.service import Reload
    from proxy.sockets.unix_socket import Listener
    from proxy.staging.on_demand import LazyStaging
    from proxy.state_directory import StateDirectory
    from proxy.succession.predecessor import Predecessor
    from proxy.takeover.on_demand import LazyTakeover
    from proxy.telemetry.port import Telemetry


@dataclass(slots=True)
class DaemonParts:
    """The parts; one is None until it is made, and if the mode or the configuration needs none.

    Attributes:
        telemetry: The log and the metrics.
        tasks: What runs as long as the daemon.
        listener: The socket that kubelet calls.
        predecessor: The daemon that this one replaces.
        acceptor: Serves the connections of the socket.
        state_directory: The ledger and its directory.
        executor: The node; None in mode ``passthrough``, as all parts of the executor.
        reconciler, runtime_sync, call_tracker: Parts of the executor that are closed after it.
        call_flow: Decides the calls of the CRI.
        suppression: Limits BE (best effort) pods.
        takeover, release, staging: Commands that take the node over, release it, and enforce step by step.
        hooks: Calls hooks.
        pod_resources, device_plugins: Servers of kubelet's APIs.
        reload: Applies a changed configuration.
        admin, pages: The admin socket, and its pages.
    """

    telemetry: Telemetry | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    listener: Listener | None = None
    predecessor: Predecessor | None = None
    acceptor: Acceptor | None = None
    state_directory: StateDirectory | None = None
    executor: NodeExecutor | None = None
    reconciler: Reconciler | None = None
    runtime_sync: RuntimeSync | None = None
    call_tracker: CallTracker | None = None
    call_flow: CallFlow | None = None
    suppression: Suppression | None = None
    takeover: LazyTakeover | None = None
    release: LazyRelease | None = None
    staging: LazyStaging | None = None
    hooks: DaemonHooks | None = None
    pod_resources: PodResourcesService | None = None
    device_plugins: DevicePluginService | None = None
    reload: Reload | None = None
    admin: AdminServer | None = None
    pages: Pages | None = None
