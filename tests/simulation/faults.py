"""The faults and all durations, derived from the seed.

While the node is *calm* nothing new goes wrong and nothing takes long, so that what is promised for then can
be checked.
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.kernel import SimulatedGroup

REFUSALS = (errno.EBUSY, errno.EBUSY, errno.EACCES, errno.EINVAL, errno.ENOSPC, errno.EPERM)
MOVE_CRASH_FACTOR = 60
LATE_LIMIT_S = 1.6
"""A call without an answer is carried out within this time: less than the two seconds of docs/applying.md."""


@dataclass(frozen=True, slots=True)
class FaultRates:
    """The rates of the faults, one for each kind."""

    kernel_refuses: float = 0.01
    no_effect: float = 0.002
    disk_full: float = 0.01
    update_late: float = 0.04
    update_fails: float = 0.02
    runtime_silent: float = 0.003
    crash: float = 0.0004
    ledger_cut: float = 0.002
    answer_lost: float = 0.05
    call_fails: float = 0.03
    client_gone: float = 0.06
    start_hangs: float = 0.02
    interleaved: float = 0.1
    slow: float = 0.02
    id_reused: float = 0.2
    named_alike: float = 0.2
    update_beside_start: float = 0.2
    stop_beside_create: float = 0.04
    call_hangs: float = 0.03
    sandbox_hangs: float = 0.15

    @classmethod
    def drawn(cls, dice: random.Random) -> FaultRates:
        """Return rates for one node: each fault is absent, rare or frequent."""
        usual, often = cls(), (0.0, 0.3, 1.0, 1.0, 3.0)
        return cls(**{each.name: getattr(usual, each.name) * dice.choice(often) for each in fields(cls)})


class Faults:
    """Decides which faults occur."""

    def __init__(self, seed: str, rates: FaultRates) -> None:
        self.dice = random.Random(f"{seed} faults")
        self.rates = rates
        self.calm = False
        self.full_until = 0.0

    def happens(self, rate: float) -> bool:
        """Return whether a fault with a rate occurs now."""
        return not self.calm and rate > 0 and self.dice.random() < rate

    def kernel_write_errno(self, group: SimulatedGroup) -> int:
        """Return the error with which the kernel refuses a write of the daemon's; 0 for none."""
        if group.refusal_errno and not self.calm:
            return group.refusal_errno
        if self.happens(self.rates.kernel_refuses):
            error = self.dice.choice(REFUSALS)
            if self.dice.random() < 0.2:
                group.refusal_errno = error
            return error
        return 0

    def write_has_no_effect(self, group: SimulatedGroup) -> bool:
        """Return whether a write succeeds without an effect, as with another cpuset partition."""
        if group.ignores_writes or self.happens(self.rates.no_effect):
            group.ignores_writes = not self.calm
        return group.ignores_writes

    def disk_is_full(self) -> bool:
        return self.happens(self.rates.disk_full)

    def update_is_late(self) -> bool:
        return self.happens(self.rates.update_late)

    def update_fails(self) -> bool:
        return self.happens(self.rates.update_fails)

    def runtime_is_silent(self) -> bool:
        return self.happens(self.rates.runtime_silent)

    def crashes(self, *, during_move: bool = False) -> bool:
        """Return whether the daemon crashes; within a move, which is rare, more often."""
        return self.happens(self.rates.crash * (MOVE_CRASH_FACTOR if during_move else 1))

    def crash_cuts_ledger(self) -> float | None:
        return self.dice.random() if self.happens(self.rates.ledger_cut) else None

    def interleaves(self) -> bool:
        return self.happens(self.rates.interleaved)


class Delays:
    """Decides how long things take, in seconds."""

    def __init__(self, seed: str, faults: Faults) -> None:
        self._dice = random.Random(f"{seed} delays")
        self._faults = faults

    def _draw_delay(self, usual: float, slow: float) -> float:
        dice = self._dice
        if self._faults.happens(self._faults.rates.slow):
            return dice.random() * slow
        return dice.random() * usual

    def job(self, worker: str) -> float:
        """Until a thread begins its next job."""
        return self._draw_delay(0.001, 1.0)

    def lag(self) -> float:
        """Until the event loop turns."""
        return self._draw_delay(0.0005, 0.05)

    def mid_job(self) -> float:
        """In the middle of a job."""
        return self._draw_delay(0.002, 0.2)

    def report(self) -> float:
        """Until a report of the kernel or of the runtime arrives."""
        return self._draw_delay(0.002, 0.3)

    def wire(self) -> float:
        """For a message on a socket."""
        return self._draw_delay(0.001, 0.1)

    def runtime(self) -> float:
        """For the runtime to carry out a call."""
        return self._draw_delay(0.05, 1.5)
