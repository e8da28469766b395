"""Playbooks: a state's events and effects in the order of a scenario.

    playbook = Playbook(reservation)
    assert playbook >> LedgerWritten() << AwaitInflight(CpuSet.parse("0-1"))

``>>`` makes an event happen, ``<<`` names the next effect. Every effect must be named before the next event,
and before the end, when ``assert`` tests whether ``playbook`` is true. States other than reservations come
with their ``step``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from proxy.engine.reservation import step as reservation_step
from proxy.engine.reservation_effects import WAITED

State = TypeVar("State")


class Playbook(Generic[State]):
    """A state and the effects that were not named yet."""

    def __init__(
        self,
        state: State,
        step: Callable[[State, Any], tuple[State, tuple[Any, ...]]] = reservation_step,  # type: ignore[assignment]
    ) -> None:
        self.state = state
        self._step = step
        self._unnamed: list[object] = []

    def __rshift__(self, event: object) -> Playbook[State]:
        assert not self._unnamed, f"before {event} there is also {self._unnamed}"
        self.state, effects = self._step(self.state, event)
        assert not any(isinstance(effect, WAITED) for effect in effects[:-1]), effects
        self._unnamed = list(effects)
        return self

    def __lshift__(self, effect: object) -> Playbook[State]:
        assert self._unnamed, f"nothing is done, instead of {effect}"
        found = self._unnamed.pop(0)
        assert found == effect, f"{found} is done, instead of {effect}"
        return self

    def __bool__(self) -> bool:
        assert not self._unnamed, f"there is also {self._unnamed}"
        return True
