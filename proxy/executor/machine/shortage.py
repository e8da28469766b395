"""Containers that have less than promised because CPUs or memory are offline (``proxy.engine.hotplug``).

A shortage is logged when it begins, changes and ends. Meanwhile it shows in ``topoproxy status``, in the
metrics, and with the decision about the container in ``topoproxy explain``.
"""

from __future__ import annotations

import time

from proxy.engine.hotplug import loss_of, losses
from proxy.engine.node_effects import LossesChanged
from proxy.engine.node_events import LossesDue
from proxy.executor.context import NodeContext
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

SHOWN = 5


class Shortage:
    """Reports hardware losses."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context

    def report(self) -> None:
        """Report what has changed since the last time."""
        context, before = self._context, self._context.state.facts.losses
        effects = context.store.handle(LossesDue())
        changes = next(effect.changes for effect in effects if type(effect) is LossesChanged)
        for container, words in changes:
            at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(context.wall()))
            back = f"at {at} all that it was promised was there again"
            context.history.amend(container.id, f"since {at} {words}" if words else back)
            context.telemetry.count(metrics.EXCLUSIVE_CPU_SHORTFALLS, container.id not in before)
        for container, words in changes[:SHOWN]:
            if words:
                context.telemetry.warning(
                    "a container has less than promised", **subject(container), reason=words
                )
            else:
                context.telemetry.warning("a container has all that was promised again", **subject(container))
        if len(changes) > SHOWN:
            more = len(changes) - SHOWN
            context.telemetry.warning("more containers have less than promised: see the status", count=more)

    def explained(self, container_id: str) -> str:
        """Return in words what a container is short of now; empty where it is short of nothing."""
        container = self._context.state.containers.get(container_id)
        loss = None if container is None else loss_of(self._context.state, container)
        return "" if loss is None else loss.words()

    def page(self) -> list[dict[str, object]]:
        """Return what ``topoproxy status`` shows, one entry for each container."""
        there = self._context.state.containers
        return [
            {
                "id": container_id,
                "container": there[container_id].ref,
                "away": str(loss.away),
                "instead": str(loss.instead),
                "cpus": str(loss.cpus),
                "missing": loss.missing,
                "nodes": str(loss.nodes),
                "what": loss.words(),
            }
            for container_id, loss in sorted(losses(self._context.state).items())
        ]
