"""Who has less than he was promised because CPUs or memory are away, and telling it.

It is told once in the log when it begins, changes and ends, and stands meanwhile in ``topoproxy status``, in
the metrics, and beside the decision about the container in ``topoproxy explain``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.controller.context import NodeContext
from proxy.model.idset import CpuSet, Mask
from proxy.model.phrases import cpus
from proxy.model.phrases import nodes as named
from proxy.model.workload import Container, Phase, Pool
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

if TYPE_CHECKING:
    from proxy.engine.state import NodeState

SHOWN = 5


@dataclass(frozen=True, slots=True)
class HardwareLoss:
    """What a container has less, or other, than it was promised.

    Attributes:
        away: CPUs of its own that are offline.
        instead: CPUs that it has in their place.
        cpus: What it runs on.
        nodes: Memory nodes of its own that are gone.
        mems: Those that it has.
    """

    away: CpuSet
    instead: CpuSet
    cpus: CpuSet
    nodes: Mask
    mems: Mask

    @property
    def missing(self) -> int:
        """By how many CPUs it has fewer than it was promised."""
        return max(len(self.away) - len(self.instead), 0)

    def words(self) -> str:
        """Say it after the name of the container."""
        parts = []
        if self.away:
            one = len(self.away) == 1
            said = f"its {cpus(self.away)} {'is' if one else 'are'} offline: it runs on {self.cpus}"
            if self.instead:
                said += f", with {cpus(self.instead)} in {'its' if one else 'their'} place"
            if self.missing:
                said += f", {self.missing} fewer than it was promised"
            parts.append(said)
        if self.nodes:
            parts.append(f"its memory of {named(self.nodes)} is gone: it has that of {named(self.mems)}")
        return "; ".join(parts)


def lacking(state: NodeState, container: Container) -> HardwareLoss | None:
    """Tell what a container lacks of what was decided for it; None where that is nothing.

    Memory nodes matter to those that are bound to some: who has all nodes has those that there are.
    """
    machine, placement = state.node.machine, container.placement
    away = placement.exclusive - machine.online
    nodes = placement.mems - machine.memory_nodes
    follows = placement.pool is Pool.OWN and state.node.follow_mems
    bound = follows or bool(placement.blocks) or placement.pool_numa_limit is not None
    if container.phase in (Phase.EXITED, Phase.CREATING) or not (away or (nodes and bound)):
        return None
    here = state.wanted(container)
    mems = state.wanted_mems(container)
    return HardwareLoss(away, here & placement.replacement, here, nodes if bound else Mask(), mems)


class Shortage:
    """Remembers who was told what.

    Attributes:
        known: By container id, what was told of it.
    """

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self.known: dict[str, str] = {}

    def now(self) -> dict[str, HardwareLoss]:
        """Give what is lacking, by container id."""
        state = self._context.state
        found = ((i, lacking(state, container)) for i, container in state.containers.items())
        return {i: lack for i, lack in found if lack is not None}

    def tell(self) -> None:
        """Tell what has changed since the last time."""
        context, now = self._context, self.now()
        lines: list[tuple[Container, str]] = []
        for container_id, lack in now.items():
            words = lack.words()
            if self.known.get(container_id) == words:
                continue
            lines.append((context.state.containers[container_id], words))
            self._note(container_id, f"since {self._time()} {words}")
            context.telemetry.count(metrics.EXCLUSIVE_CPU_SHORTFALLS, container_id not in self.known)
        for container_id in self.known.keys() - now.keys():
            if (container := context.state.containers.get(container_id)) is not None:
                lines.append((container, ""))
                self._note(container_id, f"at {self._time()} all that it was promised was there again")
        self.known = {container_id: lack.words() for container_id, lack in now.items()}
        for container, words in lines[:SHOWN]:
            if words:
                context.telemetry.warning(
                    "a container has less than promised", **subject(container), reason=words
                )
            else:
                context.telemetry.warning("a container has all that was promised again", **subject(container))
        if len(lines) > SHOWN:
            more = len(lines) - SHOWN
            context.telemetry.warning("more containers have less than promised: see the status", count=more)

    def _note(self, container_id: str, words: str) -> None:
        self._context.history.amend(container_id, words)

    def _time(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._context.wall()))

    def explained(self, container_id: str) -> str:
        """Say of a container what it lacks now; empty for nothing."""
        container = self._context.state.containers.get(container_id)
        lack = None if container is None else lacking(self._context.state, container)
        return "" if lack is None else lack.words()

    def page(self) -> list[dict[str, object]]:
        """Give what ``topoproxy status`` shows, one entry for each container."""
        there = self._context.state.containers
        return [
            {
                "id": container_id,
                "container": there[container_id].ref,
                "away": str(lack.away),
                "instead": str(lack.instead),
                "cpus": str(lack.cpus),
                "missing": lack.missing,
                "nodes": str(lack.nodes),
                "what": lack.words(),
            }
            for container_id, lack in sorted(self.now().items())
        ]
