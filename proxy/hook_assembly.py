"""Makes the hook engine, the registry of hook files and the hook bridge, and connects them.

Only nodes with hooks import this module; see ``proxy.hooks_setup``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from proxy.calls.call_flow import CallFlow
from proxy.config.hooks import HooksConfig
from proxy.executor.node_executor import NodeExecutor
from proxy.frontends.cri import hook_view  # noqa: F401  no call must import it (``proxy.replaced_files``)
from proxy.frontends.hook_bridge.backfill import Backfill
from proxy.frontends.hook_bridge.bridge import HookBridge
from proxy.frontends.hook_bridge.held_call_hooks import HeldCallHooks
from proxy.frontends.hook_bridge.lifecycle_events import LifecycleEvents
from proxy.frontends.hook_bridge.updates import HookUpdates
from proxy.hooks import status_data  # noqa: F401  no page must import it
from proxy.hooks.engine.engine import HookEngine
from proxy.hooks.registry import HookRegistry


@dataclass(frozen=True, slots=True)
class HookParts:
    """The parts of a daemon that hooks need.

    Attributes:
        engine: Calls hooks.
        registry: The registry of their files.
        updates: Carries out the updates of containers that hooks request.
        backfill: Looks up facts of containers that hooks need.
    """

    engine: HookEngine
    registry: HookRegistry
    updates: HookUpdates
    backfill: Backfill


def hook_parts_of(
    config: HooksConfig, executor: NodeExecutor, flow: CallFlow, marks: Path | None
) -> HookParts:
    """Make the parts and connect them.

    Args:
        config: The directories of hooks, and how hooks are called.
        executor: The executor of the node.
        flow: Decides calls.
        marks: The directory that records which file is being loaded.
    """
    owned = config.owned_cpus
    updates = HookUpdates(executor, owned_cpus=owned)
    engine = HookEngine(executor.telemetry.problem, updates.queue)
    backfill = Backfill(executor, engine)
    lifecycle_events = LifecycleEvents(
        executor, engine, backfill.resumed, backfill.look_up_later, backfill.look_up_in_call, owned_cpus=owned
    )
    backfill.lifecycle_events = lifecycle_events
    registry = HookRegistry(
        config,
        engine,
        lambda: lifecycle_events.synchronize_event() if executor.reconciled.is_set() else None,
        executor.telemetry.problem,
        executor.telemetry.event,
        executor.telemetry.resolved,
        marks=marks,
    )
    look_up, spawn = backfill.look_up_in_call, flow.spawn
    held_call_hooks = HeldCallHooks(
        executor, engine, updates, lifecycle_events, spawn, look_up, owned_cpus=owned
    )
    executor.store.subscribe(lifecycle_events)
    flow.set_hooks(HookBridge(held_call_hooks))
    return HookParts(engine, registry, updates, backfill)
