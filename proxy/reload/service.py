"""Reloads the configuration of a running daemon.

Theory of operation. A reload has three parts:

1. The file is read and validated as a whole, in another process: reading takes tens of milliseconds and some
   megabytes, and kubelet's calls must not wait for it (``reread``).
2. The new configuration is compared with the running one. Keys that need a restart keep their running values,
   and the report names them. The resulting configuration is checked again, also against the machine, because
   a part of a change may contradict the values that stay.
3. Each step (``LiveStep``) prepares its part, and may refuse it. When all have prepared, all parts are
   applied in one turn of the event loop, so that no call is decided by half of a configuration. If one part
   fails, the parts that were already applied are reverted.

Nothing about a reload is stored. A daemon that is killed during a reload reads the file at its next start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from proxy.config.checks import check, configuration_error
from proxy.config.cluster_config import IGNORED
from proxy.config.files import exposed_files
from proxy.config.machine_checks import check_start
from proxy.config.schema import Config
from proxy.model import schema_ids
from proxy.model.errors import ConfigError, TopoproxyError
from proxy.reload.reread import KeyChange, changes, reread, with_live_values
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.config.origin import Origin
    from proxy.model.machine import Machine
    from proxy.notify import SystemdNotifier
    from proxy.telemetry.port import Telemetry


NOT_RELOADED = "the configuration was not reloaded, nothing has changed"
NEEDS_RESTART = "settings take effect at the next restart"
NOTICE = "notice about the configuration"
NO_ORIGIN = "cannot reload: the daemon was not started from a configuration file"


@dataclass(frozen=True, slots=True)
class ReloadOutcome:
    """How a reload ended.

    Attributes:
        result: ``applied``, ``unchanged`` (nothing that can change while the daemon runs differs) or
            ``refused``.
        at: When it ended, in seconds since the epoch.
        by: What caused it: ``SIGHUP`` or ``admin``.
        applied: The keys that have changed.
        reason: Why it was refused; empty otherwise.
        notes: Notes on the configuration for the operator, one sentence each.
    """

    result: str
    at: float
    by: str
    applied: Sequence[KeyChange] = ()
    reason: str = ""
    notes: Sequence[str] = field(default_factory=tuple)

    def page(self) -> dict[str, object]:
        """Return it as plain data."""
        return {
            "result": self.result,
            "at": self.at,
            "by": self.by,
            "applied": [change_row(change) for change in self.applied],
            "reason": self.reason,
            "notes": list(self.notes),
        }


def change_row(change: KeyChange) -> dict[str, object]:
    """Return a changed key as plain data."""
    return {"key": change.key, "before": change.before, "after": change.after}


class Reload:
    """Reloads the configuration, one reload at a time.

    Attributes:
        config: The configuration in effect.
        waiting_for_restart: Keys whose new values wait for a restart.
        last: How the last reload ended; None before the first.
    """

    def __init__(
        self,
        config: Config,
        steps: Sequence[LiveStep],
        machine: Callable[[], Machine],
        telemetry: Telemetry,
        notifier: SystemdNotifier,
        read: Callable[[Origin], Awaitable[Config]] = reread,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Store the configuration that was read at the start.

        Args:
            config: The configuration in effect.
            steps: The steps that apply it; each live key belongs to one of them.
            machine: Returns the machine as it is now.
            telemetry: Where to log, count and report.
            notifier: Is notified that a reload begins and ends.
            read: Reads and validates the configuration.
            wall_clock: Seconds since the epoch.
        """
        self.config = config
        self.waiting_for_restart: list[KeyChange] = []
        self.last: ReloadOutcome | None = None
        self._steps = steps
        self._machine = machine
        self._telemetry = telemetry
        self._notifier = notifier
        self._read = read
        self._wall_clock = wall_clock
        self._since = wall_clock()
        self._notices: Sequence[str] = ()
        self._lock = asyncio.Lock()

    async def run(self, by: str) -> ReloadOutcome:
        """Reload; wait for a reload that is already running.

        Args:
            by: The cause of the reload, for the log and the status.
        """
        async with self._lock:
            self._notifier.reloading()
            try:
                self.last = await self._reload(by)
            finally:
                self._notifier.ready()
            self._report(self.last)
            return self.last

    def report_notices(self, notices: Sequence[str]) -> None:
        """Report notes on the configuration in effect for the operator; end notes that no longer hold."""
        for gone in [each for each in self._notices if each not in notices]:
            self._telemetry.resolved(NOTICE, reason=gone)
        for each in notices:
            self._telemetry.problem(NOTICE, reason=each)
        self._notices = notices

    async def _reload(self, by: str) -> ReloadOutcome:
        origin = self.config.origin
        if origin is None:
            return ReloadOutcome("refused", self._wall_clock(), by, reason=NO_ORIGIN)
        try:
            requested = await self._read(origin)
            try:
                return await self._apply_requested(requested, by)
            except ConfigError as error:
                # The settings from the cluster must not prevent a change of the node's own settings.
                if requested.without_cluster is None or not self.config.cluster_fault:
                    raise
                own = replace(requested.without_cluster, cluster_fault=f"{IGNORED}: {error}")
                return await self._apply_requested(own, by)
        except TopoproxyError as error:
            return ReloadOutcome("refused", self._wall_clock(), by, reason=str(error))
        except Exception as error:  # noqa: BLE001  an internal error must not end the daemon
            self._telemetry.fault(error)
            return ReloadOutcome("refused", self._wall_clock(), by, reason=f"internal error: {error!r}")

    async def _apply_requested(self, requested: Config, by: str) -> ReloadOutcome:
        """Apply those keys of a configuration that need no restart."""
        notes, running = await asyncio.to_thread(exposed_files, requested), self.config
        # The file's name is not a setting; it changes with the others.
        effect = replace(
            with_live_values(running, requested),
            source=requested.source,
            origin=requested.origin,
            cluster_fault=requested.cluster_fault,
            former_keys=requested.former_keys,
            without_cluster=requested.without_cluster,
        )
        if problems := check(effect):
            raise ConfigError(
                f"{configuration_error(requested.source, problems)} (with the keys that wait for a restart; "
                "restart to apply the whole file)"
            )
        notes = [*check_start(effect, self._machine()), *notes]
        applied = changes(running, effect)
        self._apply(running, effect, [change.key for change in applied])
        self.config, self._since = effect, self._wall_clock()
        self.waiting_for_restart = changes(effect, requested)
        return ReloadOutcome(
            "applied" if applied else "unchanged", self._since, by, applied=applied, notes=notes
        )

    def _apply(self, running: Config, effect: Config, keys: list[str]) -> None:
        """Apply all parts or none."""
        concerned = [step for step in self._steps if step.is_concerned_by(keys)]
        prepared: list[tuple[LiveStep, Commit]] = [
            (step, step.prepare(running, effect)) for step in concerned
        ]
        done: list[LiveStep] = []
        try:
            for step, commit in prepared:
                done.append(step)
                commit()
        except BaseException:
            for step in reversed(done):
                step.prepare(effect, running)()
            raise

    def _report(self, outcome: ReloadOutcome) -> None:
        telemetry, source = self._telemetry, self.config.source
        telemetry.count(metrics.CONFIG_RELOADS, result=outcome.result)
        if outcome.result == "refused":
            telemetry.problem(NOT_RELOADED, err=outcome.reason)
            return
        telemetry.resolved(NOT_RELOADED)
        self.report_notices(outcome.notes)
        telemetry.event(
            "the configuration was reloaded",
            path=source,
            by=outcome.by,
            changed="; ".join(map(str, outcome.applied)) or "nothing",
        )
        if self.waiting_for_restart:
            telemetry.warning(NEEDS_RESTART, keys="; ".join(map(str, self.waiting_for_restart)))

    def page(self) -> dict[str, object]:
        """Return the part of ``topoproxy status`` about the configuration."""
        return {
            "source": self.config.source,
            "since": self._since,
            "restart": [change_row(change) for change in self.waiting_for_restart],
            "reload": {} if self.last is None else self.last.page(),
        }

    async def action(self) -> dict[str, object]:
        """Reload for a client of the admin socket; return how it ended."""
        await self.run("admin")
        return {"schema": schema_ids.RELOAD, **self.page()}


Commit = Callable[[], None]
"""Makes a prepared change. It does not wait, and nothing in it can be refused."""


@dataclass(frozen=True, slots=True)
class LiveStep:
    """Applies some keys.

    Attributes:
        keys: Keys, or sections (for all their live keys).
        prepare: Takes the running and the new configuration and returns a function that changes the one into
            the other. Changes nothing itself. Runs on the event loop, right before the commits of all steps.
            Raises ConfigError if the node cannot follow.
    """

    keys: tuple[str, ...]
    prepare: Callable[[Config, Config], Commit]

    def applies(self, key: str) -> bool:
        """Return whether the step applies a key."""
        return any(key == own or key.startswith(f"{own}.") for own in self.keys)

    def is_concerned_by(self, changed: Iterable[str]) -> bool:
        """Return whether the step applies one of these keys."""
        return any(self.applies(key) for key in changed)
