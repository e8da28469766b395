"""What has come of a call so far: what was said, whether it is refused, and what went wrong."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.hooks.answers import NOTHING, Adjustment, Veto
from proxy.hooks.engine.claims import Claims, Said
from proxy.hooks.engine.seats import Seat
from proxy.hooks.engine.traces import Fault
from proxy.hooks.engine.words import task
from proxy.hooks.hook import AS_IT_IS, Outcome, Policy
from proxy.hooks.points import Point


class Tally:
    """The sum of the answers; whoever has the call adds to it."""

    __slots__ = ("_claims", "firm", "notes", "refusal")

    def __init__(self) -> None:
        self._claims = Claims()
        self.firm = False
        self.refusal = ""
        self.notes: list[tuple[Seat, Fault]] = []

    def shown(self) -> Adjustment:
        """Give a copy of what hooks want together so far: what a hook does to it changes nothing."""
        return self._claims.merged()

    @property
    def owners(self) -> Mapping[str, str]:
        """Field to the hook that has said it."""
        return self._claims.owners

    def said(self, seat: Seat, said: Said | Veto, event: Point) -> Fault | None:
        """Take an answer; gives why not, if it says what another hook has said."""
        if isinstance(said, Veto):
            seat.refused()
            self.refusal = f"cannot {task(event)}: hook {seat.hook.name}: {said.reason}"
            return None
        if clash := self._claims.claim(seat.hook.name, said):
            return Fault("conflict", clash)
        self.firm = self.firm or seat.hook.policy is Policy.FAIL
        return None

    def failed(self, seat: Seat, fault: Fault, event: Point) -> None:
        """A hook has failed, or was not asked: its policy says what becomes of the call."""
        if fault.kind != "open":  # that it is not asked for a while was told when it failed
            self.notes.append((seat, fault))
        if seat.hook.policy is Policy.FAIL and event.VETO and not self.refusal:
            self.refusal = f"cannot {task(event)}: hook {seat.hook.name}: {fault.text}"

    def outcome(self) -> Outcome:
        """Give what comes of it."""
        if self.refusal:
            return Outcome(refusal=self.refusal)
        adjustment = self._claims.merged()
        return Outcome(adjustment, self.owners, firm=self.firm) if adjustment is not NOTHING else AS_IT_IS
