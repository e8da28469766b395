"""Playbooks: a reservation's events and effects in the order of a story.

    playbook = Playbook(reservation)
    assert playbook >> LedgerWritten() << AwaitInflight(CpuSet.parse("0-1"))

``>>`` has an event happen, ``<<`` names the next effect. Every effect must be named before the next event,
and before the end, where ``playbook`` is asked whether it is true.
"""

from __future__ import annotations

from proxy.engine.effects import WAITED, Effect
from proxy.engine.events import Event
from proxy.engine.reservation import step
from proxy.engine.reservation_state import Reservation


class Playbook:
    """A reservation and the effects that were not named yet."""

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation
        self._unnamed: list[Effect] = []

    def __rshift__(self, event: Event) -> Playbook:
        assert not self._unnamed, f"before {event} there is also {self._unnamed}"
        self.reservation, effects = step(self.reservation, event)
        assert not any(isinstance(effect, WAITED) for effect in effects[:-1]), effects
        self._unnamed = list(effects)
        return self

    def __lshift__(self, effect: Effect) -> Playbook:
        assert self._unnamed, f"nothing is done, instead of {effect}"
        found = self._unnamed.pop(0)
        assert found == effect, f"{found} is done, instead of {effect}"
        return self

    def __bool__(self) -> bool:
        assert not self._unnamed, f"there is also {self._unnamed}"
        return True
