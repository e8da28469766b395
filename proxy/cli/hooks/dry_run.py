"""Calls hooks with the real engine, without a daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.hooks.answers import CLEAR, LEAVE, MAPS, Adjustment, Update
from proxy.hooks.engine.engine import HookEngine
from proxy.hooks.engine.stats import HookReport
from proxy.hooks.events import VALIDATES, Configure, Point, Shutdown
from proxy.hooks.facts import Device, Mount
from proxy.hooks.hook import Outcome
from proxy.hooks.loader.loading import Loaded
from proxy.model.errors import HookError
from proxy.telemetry.port import silent


@dataclass(frozen=True, slots=True)
class EventResult:
    """The result of one event.

    Attributes:
        event: The event.
        outcome: Of the call.
        failed: The state of the hooks that failed at it.
        handled: A hook was called.
    """

    event: Point
    outcome: Outcome
    failed: Sequence[HookReport]
    handled: bool


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """The result of a dry run.

    Attributes:
        asked: The events, in order.
        reports: How each hook did.
    """

    asked: Sequence[EventResult]
    reports: Sequence[HookReport]

    @property
    def failed(self) -> list[HookReport]:
        """Hooks that did not answer as they should have."""
        return [report for report in self.reports if report.failures]


async def dry_run(hooks: Sequence[Loaded], events: Sequence[Point]) -> DryRunResult:
    """Configure hooks, send them events one after the other, and shut them down.

    Args:
        hooks: As they were loaded.
        events: The events. ``configure`` and ``shutdown`` are sent in any case.

    Raises:
        HookError: One cannot be configured; the daemon would not use it.
    """
    engine = HookEngine(silent, lambda _, __: None)
    try:
        for loaded in hooks:
            error = await engine.notify_one(loaded.hook, Configure(loaded.settings, loaded.hook.name))
            if error is not None:
                raise HookError(f"cannot configure hook {loaded.hook.source}: {error}")
        engine.use([loaded.hook for loaded in hooks])
        rows = []
        for event in events:
            before = _failures(engine)
            outcome = Outcome()
            if not isinstance(event, Configure | Shutdown):
                answers = engine.ask(event)
                outcome = answers.outcome or await answers.wait()
            failed = [one for one in engine.report() if _count(one) > before.get(one.name, 0)]
            rows.append(EventResult(event, outcome, failed, handled(hooks, event)))
        for loaded in hooks:
            await engine.notify_one(loaded.hook, Shutdown("stop"))
        reports = engine.report()
    finally:
        engine.close()
    return DryRunResult(rows, reports)


def _failures(engine: HookEngine) -> dict[str, int]:
    return {report.name: _count(report) for report in engine.report()}


def _count(report: HookReport) -> int:
    return sum(report.failures.values())


def handled(hooks: Sequence[Loaded], event: Point) -> bool:
    """Return whether any of the hooks is called about an event."""
    names = {event.NAME, VALIDATES.get(event.NAME)}
    return any(names & loaded.hook.handlers.keys() for loaded in hooks)


def fields_of(adjustment: Adjustment) -> Iterator[tuple[str, str]]:
    """Iterate over what an adjustment says: the field as it is owned, and the value in words."""
    for name, value in adjustment.said():
        if name == "updates":
            for container_id, update in value.items():  # type: ignore[attr-defined]
                for field, text in _of_update(update):
                    yield f"updates[{container_id}].{field}", text
        elif name in MAPS:
            for key, entry in value.items():  # type: ignore[attr-defined]
                yield f"{name}[{key}]", _shown(entry)
        else:
            yield name, _shown(value)


def _of_update(update: Update) -> Iterator[tuple[str, str]]:
    for name in Update.__slots__:
        value = getattr(update, name)
        if isinstance(value, Mapping):
            for key, entry in value.items():
                yield f"{name}[{key}]", _shown(entry)
        elif value is not LEAVE:
            yield name, _shown(value)


def _shown(value: Any) -> str:
    if value is CLEAR:
        return "cleared"
    if isinstance(value, Mount):
        return f"{value.host_path}{' (read-only)' if value.readonly else ''}"
    if isinstance(value, Device):
        return f"{value.host_path} ({value.permissions})"
    return str(value)
