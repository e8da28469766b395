"""Makes the hook engine, the registry of hook files and the hook bridge, and connects them.

Only nodes with hooks import this module; see ``proxy.hooks_setup``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from proxy.calls.call_flow import CallFlow
from proxy.config.hooks import HooksConfig
from proxy.executor.node_executor import NodeExecutor
from proxy.frontends.hook_bridge.backfill import Backfill
from proxy.frontends.hook_bridge.bridge import HookBridge
from proxy.frontends.hook_bridge.dispatch import HookDispatcher
from proxy.frontends.hook_bridge.lifecycle_events import LifecycleEvents
from proxy.frontends.hook_bridge.updates import Updates
from proxy.hooks.engine.engine import HookEngine
from proxy.hooks.registry import HookRegistry


@dataclass(frozen=True, slots=True)
class HookParts:
    """The parts of a daemon that hooks need.

    Attributes:
        engine: Calls hooks.
        library: The registry of their files.
        updates: Carries out the updates of containers that hooks request.
        learning: Looks up facts of containers that hooks need.
    """

    engine: HookEngine
    library: HookRegistry
    updates: Updates
    learning: Backfill


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
    updates = Updates(executor, owned_cpus=owned)
    engine = HookEngine(executor.telemetry.problem, updates.take)
    learning = Backfill(executor, engine)
    lifecycle_events = LifecycleEvents(
        executor, engine, learning.resumed, learning.later, learning.in_call, owned_cpus=owned
    )
    learning.lifecycle_events = lifecycle_events
    library = HookRegistry(
        config,
        engine,
        lambda: lifecycle_events.everything() if executor.reconciled.is_set() else None,
        executor.telemetry.problem,
        executor.telemetry.event,
        executor.telemetry.resolved,
        marks=marks,
    )
    learn, spawn = learning.in_call, flow.spawn
    dispatcher = HookDispatcher(executor, engine, updates, lifecycle_events, spawn, learn, owned_cpus=owned)
    executor.store.subscribe(lifecycle_events)
    flow.hook(HookBridge(dispatcher))
    return HookParts(engine, library, updates, learning)
