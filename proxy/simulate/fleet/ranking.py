"""The nodes that both schedulers would take, in order, for one kind of pod; what has changed is ranked again.

Theory. With ``percentageOfNodesToScore`` 100 kube-scheduler asks the extender about every node that has room,
and adds its scores to its own: thousands of nodes for each pod, of which one has changed since the last pod.
So nodes lie in ranks, by what the extender's score follows from and by the stock score, and a node changes
its rank when it changes. The answers are those of ``NodeTable.filter`` and ``NodeTable.scores``: a class of
nodes that no pod of the kind has met is judged by the engine, one for each pod once enough other nodes fit.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence

from proxy.scheduler.decision import NodeVerdict
from proxy.scheduler.node_table import ENOUGH, NEW_CLASSES, NodeTable
from proxy.scheduler.pod_demand import PodDemand
from proxy.scheduler.scores import Strategy, volcano_scores
from proxy.simulate.fleet.stock_scheduler import UNFIT, StockView

_Rank = tuple[int, int]
"""What the extender's score follows from, and the stock score."""
_NEW = (-1, UNFIT)
"""The rank of nodes of a class that was not judged."""


class Ranking:
    """The nodes for one kind of pod."""

    def __init__(self, table: NodeTable, names: Sequence[str], strategy: Strategy) -> None:
        """Rank no nodes yet.

        Args:
            table: The nodes as the extender knows them.
            names: Their names, by position.
            strategy: How the extender scores nodes.
        """
        self._table = table
        self._names = names
        self._strategy = strategy
        self._ranks: dict[_Rank, list[int]] = {}
        self._rank_of: list[_Rank | None] = [None] * len(names)
        self._fitting = 0
        self._seen = 0
        self._known: dict[int, NodeVerdict] | None = None

    def update(self, demand: PodDemand, changes: Sequence[int], view: StockView) -> None:
        """Rank the nodes that have changed, and judge classes of nodes as the extender does.

        Args:
            demand: A pod of the kind.
            changes: The nodes that have changed, one for each change.
            view: The nodes as the stock scheduler sees them now for this kind.
        """
        known = self._table.verdicts_of(demand)
        fresh = known is not self._known  # verdicts are forgotten when there are too many
        changed: Iterable[int] = range(len(self._names)) if fresh else set(changes[self._seen :])
        self._known, self._seen = known, len(changes)
        for at in changed:
            self._rank(at, self._rank_now(at, demand, known, view.scores[at]))
        judged, fits = 0, self._fitting
        for at in [*self._ranks.get(_NEW, ())]:
            if self._rank_of[at] == _NEW:
                if judged >= NEW_CLASSES and fits >= ENOUGH:
                    break
                judged += 1
                self._table.verdict(self._names[at], demand, known)
                for each in [*self._ranks[_NEW]]:
                    self._rank(each, self._rank_now(each, demand, known, view.scores[each]))
            fits += self._rank_of[at] is not None

    def best(self, added: Sequence[int]) -> list[int]:
        """Return the nodes with the best sum of scores, in ascending order; empty where none fits.

        Args:
            added: What is added to the stock score, by the score of the extender.
        """
        scores = self._scores()
        totals = {rank: added[scores[rank[0]]] + rank[1] for rank in self._ranks if rank != _NEW}
        highest = max(totals.values(), default=0)
        return sorted(at for rank, total in totals.items() if total == highest for at in self._ranks[rank])

    def scores(self) -> dict[int, int]:
        """Return the score that the extender gives each node that fits."""
        scores = self._scores()
        return {at: scores[rank[0]] for at, rank in enumerate(self._rank_of) if rank not in (None, _NEW)}

    def _scores(self) -> dict[int, int]:
        """Return the extender's scores by what they follow from."""
        worths = [*{worth for worth, _ in self._ranks.keys() - {_NEW}}]
        if self._strategy is not Strategy.FEWEST_NUMA_NODES:
            return dict(zip(worths, worths, strict=True))
        return dict(zip(worths, volcano_scores(worths), strict=True))

    def _rank(self, at: int, after: _Rank | None) -> None:
        """Put a node into a rank; None: it does not fit."""
        before = self._rank_of[at]
        if before == after:
            return
        self._rank_of[at] = after
        if before is not None:
            existing = self._ranks[before]
            del existing[bisect.bisect_left(existing, at)]
            if not existing:
                del self._ranks[before]
        if after is not None:
            bisect.insort(self._ranks.setdefault(after, []), at)
        self._fitting += (after not in (None, _NEW)) - (before not in (None, _NEW))

    def _rank_now(
        self, at: int, demand: PodDemand, known: Mapping[int, NodeVerdict], score: int
    ) -> _Rank | None:
        """Return the rank of a node as it is now."""
        if score == UNFIT:
            return None
        name = self._names[at]
        verdict = self._table.known_verdict(name, demand, known)
        if verdict is None:
            return _NEW
        if not verdict.fits:
            return None
        if self._strategy is Strategy.FEWEST_NUMA_NODES:
            return len(verdict.numa_nodes), score
        return self._table.scores(demand, [name], self._strategy)[0], score
