"""Drift: a kernel value that is not ours.

Whoever has a reason to believe that somebody else has written cpusets says so (``suspect``). What is
suspected is gathered for a moment, so that a burst costs one comparison, and
then compared in the kernel's worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.keeper.keeper import Keeper

GATHER_S = 0.02
"""How long suspicions are gathered before they are looked into."""


class Drift:
    """Looks into what somebody else may have written.

    Attributes:
        hints: By container id, who was last suspected of having written, and when (the keeper's clock).
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.hints: dict[str, tuple[str, float]] = {}
        self._suspected: set[str] = set()
        self._looks = False

    def suspect(self, author: str, ids: Iterable[str] | None = None) -> None:
        """Compare some containers with what they should have, at once; callable from the event loop only.

        Args:
            author: Who may have written: ``kubelet``, ``systemd``, ``runc`` or ``unknown``.
            ids: Whose sets; all containers' if None.
        """
        keeper = self._keeper
        there = keeper.state.containers
        now = keeper.clock()
        for container_id in there if ids is None else ids:
            if container_id in there:
                self.hints[container_id] = author, now
                self._suspected.add(container_id)
        if self._suspected and keeper.options.enforce and not self._looks:
            self._looks = True
            keeper.spawn(self._look())

    async def _look(self) -> None:
        try:
            await asyncio.sleep(GATHER_S)
        finally:
            self._looks = False
        ids, self._suspected = list(self._suspected), set()
        await self._keeper.follow(ids)
