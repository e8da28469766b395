"""Write wars: somebody writes a container's cpuset again and again. Pure; times are given.

Theory. A set that is wrong is put back at once: most of what else writes cpusets (a reload, an update of the
runtime behind our back) does so once. Who comes back is another matter: to put a set back costs a write in a
lock that the whole kernel shares, and moves every thread of the container, and so does the other's. So:

    peace   put back at once; the MANY-th time within WINDOW_S is a war
    war     put back when it is due: after FIRST_S, then twice as long each time, up to LONGEST_S;
            where CPUs are at stake that somebody owns never later than URGENT_S. It never stops
    over    the set was right for QUIET_S; whoever comes then finds peace

Whoever is fast enough to begin a war, every WINDOW_S / 2, is seen again long before QUIET_S have passed, and
whoever is slow enough to end one does not begin the next: nothing flaps between the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from proxy.model.backoff import Backoff
from proxy.model.idset import CpuSet

MANY = 3
WINDOW_S = QUIET_S = 30.0
FIRST_S, LONGEST_S, URGENT_S = 0.5, 60.0, 1.0
GAPS = Backoff(FIRST_S, LONGEST_S, tolerated=MANY - 1)


@dataclass(frozen=True, slots=True)
class War:
    """One war, about one container's set (times are seconds of a clock that never jumps).

    Attributes:
        began: When the first of its writes was put back.
        times: How often the set was put back since.
        repaired: When that was last done.
        wrong: When the set was last seen to be wrong.
        found: What was there that time.
    """

    began: float
    times: int
    repaired: float
    wrong: float
    found: CpuSet

    def due(self, *, urgent: bool) -> float:
        """Give the time from which the set may be put back."""
        gap = GAPS.delay(self.times)
        return self.repaired + (min(gap, URGENT_S) if urgent else gap)


class Wars:
    """The wars of a node, by container id.

    ``waits`` and ``in`` may be called from any thread: each looks at one war once, and a war is replaced,
    never changed.
    """

    def __init__(self) -> None:
        self._recent: dict[str, tuple[float, ...]] = {}
        self._wars: dict[str, War] = {}

    def __contains__(self, container_id: object) -> bool:
        return container_id in self._wars

    def __len__(self) -> int:
        return len(self._wars)

    def all(self) -> dict[str, War]:
        """Give the wars of now."""
        return dict(self._wars)

    def waits(self, container_id: str, now: float, *, urgent: bool) -> bool:
        """Tell whether a set that is wrong is not to be put back yet."""
        war = self._wars.get(container_id)
        return war is not None and now < war.due(urgent=urgent)

    def repaired(self, container_id: str, found: CpuSet, now: float) -> War | None:
        """A set was put back.

        Args:
            container_id: Whose.
            found: What was there; empty where nobody has read it.
            now: When.

        Returns:
            The war, if this began one.
        """
        war = self._wars.get(container_id)
        if war is not None:
            self._wars[container_id] = War(war.began, war.times + 1, now, now, found or war.found)
            return None
        recent = (*(t for t in self._recent.get(container_id, ()) if now - t <= WINDOW_S), now)
        if len(recent) < MANY:
            self._recent[container_id] = recent
            return None
        self._recent.pop(container_id, None)
        war = self._wars[container_id] = War(recent[0], len(recent), now, now, found)
        return war

    def left(self, container_id: str, found: CpuSet, now: float) -> None:
        """A set is wrong and was left so, because it is not due."""
        war = self._wars.get(container_id)
        if war is not None:
            self._wars[container_id] = dataclasses.replace(war, wrong=now, found=found)

    def ended(self, now: float) -> dict[str, War]:
        """End the wars in which it has been quiet for long enough, and give them."""
        over = {key: war for key, war in self._wars.items() if now - war.wrong >= QUIET_S}
        for key in over:
            del self._wars[key]
        return over

    def keep(self, there: Collection[str], now: float) -> None:
        """Forget who is gone, and what is too long ago to count."""
        self._wars = {key: war for key, war in self._wars.items() if key in there}
        self._recent = {
            key: recent
            for key, recent in self._recent.items()
            if key in there and now - recent[-1] <= WINDOW_S
        }
