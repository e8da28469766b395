"""Telemetry that a test can read: log records and reports as lines of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from proxy.telemetry.port import Report, Telemetry
from proxy.telemetry.text import plain, rendered


@dataclass
class CapturedLog:
    """A log: its records as text."""

    lines: list[str] = field(default_factory=list)
    levels: tuple[str, ...] = ("debug", "info", "warning", "error")

    def enabled(self, level: str) -> bool:
        return level in self.levels

    def write(self, level: str, message: str, keys: Mapping[str, object], above: int) -> None:
        if self.enabled(level):
            self.lines.append(rendered(message, keys))


def telemetry(lines: list[str] | None = None, clock: Callable[[], float] = lambda: 1.0) -> Telemetry:
    """Return telemetry whose log records go to a list."""
    return Telemetry(CapturedLog([] if lines is None else lines), clock)


def report(lines: list[str]) -> Report:
    """Return a function that appends reports to a list."""

    def reported(message: str, /, **keys: object) -> None:
        lines.append(rendered(message, plain(keys)))

    return reported


def reasons(lines: list[str]) -> Report:
    """Return a function that appends the reason of each report to a list."""

    def reported(message: str, /, **keys: object) -> None:
        facts = plain(keys)
        lines.append(str(facts.get("err", facts.get("reason", rendered(message, facts)))))

    return reported


def of_hooks(lines: list[str]) -> Report:
    """Return a function that appends reports about failures of hooks, with the hook's name, to a list."""

    def reported(message: str, /, **keys: object) -> None:
        facts = plain(keys)
        if message == "a hook failed":
            lines.append(f"hook {facts['hook']}: {facts['reason']}")
        else:
            lines.append(rendered(message, facts))

    return reported
