"""Pods that found no node, and the moves of other pods that would make room for them.

The search for moves makes thousands of decisions. So other requests are answered between its steps, and it
ends after ``SEARCH_S``. kube-scheduler tries a pod that found no node again within five minutes
(``DefaultPodMaxInUnschedulablePodsDuration``), so a pod that it no longer tries has been deleted, or has
found a node elsewhere.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from itertools import chain

from proxy.scheduler.advice import find_moves
from proxy.scheduler.node_table import NodeTable
from proxy.scheduler.pod_demand import PodDemand

MOST_WAITING = 500
"""The most pods that are kept."""
MOST_ADVISED = 10
"""The most pods for which moves are searched: those that were tried last."""
FORGET_S = 900.0
"""Seconds without another try after which a pod no longer waits."""
SEARCH_S = 2.0
"""Seconds after which a search for moves ends, with what it has found."""


class WaitingPods:
    """Keeps the pods that found no node."""

    def __init__(self, table: NodeTable) -> None:
        """Start without pods."""
        self._table = table
        self._unschedulable: OrderedDict[str, tuple[PodDemand, float]] = OrderedDict()
        self._search = asyncio.Lock()

    def record_unschedulable(self, demand: PodDemand) -> None:
        """Record that no candidate would admit a pod."""
        self._unschedulable[demand.key] = demand, asyncio.get_running_loop().time()
        self._unschedulable.move_to_end(demand.key)
        if len(self._unschedulable) > MOST_WAITING:
            self._unschedulable.popitem(last=False)

    def record_placed(self, uid: str) -> None:
        """Record that a pod has found a node."""
        self._unschedulable.pop(uid, None)

    async def advice(self, ref: str = "") -> dict[str, object]:
        """Return the waiting pods, and moves that would make room for them.

        Args:
            ref: Search only for this pod (``namespace/name``); empty: for those that were tried last.
        """
        async with self._search:
            loop = asyncio.get_running_loop()
            now = loop.time()
            demands = [demand for demand, at in self._unschedulable.values() if now - at < FORGET_S]
            names = [name for name in self._table.names() if self._table.node(name) is not None]
            advised = [demand for demand in reversed(demands) if not ref or demand.ref == ref][:MOST_ADVISED]
            moves, complete = [], True
            searches = (find_moves(self._table, demand, names) for demand in advised)
            for step in chain.from_iterable(searches):
                if step is not None:
                    found = {"pod": step.pod, "node": step.node, "move": step.moved, "to": step.target}
                    moves.append(found)
                if loop.time() - now > SEARCH_S:
                    complete = False
                    break
                await asyncio.sleep(0)
            return {"waiting": [demand.ref for demand in demands], "moves": moves, "complete": complete}
