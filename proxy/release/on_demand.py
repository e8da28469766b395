"""The release of a daemon: made on demand, if the ledger has a release, or at a stop.

Its code is imported at the start: at a stop the files may be those of another version
(``proxy.replaced_files``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from proxy.config.schema import Config
from proxy.model import schema_ids
from proxy.model.errors import InputError

if TYPE_CHECKING:
    from proxy.admin.server import Route
    from proxy.executor.best_effort.suppression import Suppression
    from proxy.executor.node_executor import NodeExecutor
    from proxy.release.service import Release

NOTHING = "there is nothing to release: in {mode} mode no container is moved ({advice})"
ADVICE = {
    "observe": "topoproxy enforce status shows whether containers still get back what they had",
    "passthrough": "an earlier run in enforce mode: stop the daemon, then topoproxy release --offline",
}
"""What to do about the changes that an earlier run in mode enforce has left, by mode."""
NO_LEDGER = (
    "cannot undo the release: in passthrough mode the ledger is not read (topoproxy release --offline --undo)"
)
RELEASE_RECORD = "r/release"
"""The key of the record in the ledger; the record holds the stage and the time when the release began."""


class LazyRelease:
    """Makes the release of a daemon on demand."""

    def __init__(
        self,
        config: Config,
        executor: NodeExecutor | None,
        suppression: Callable[[], Suppression | None],
    ) -> None:
        """Store the parts.

        Args:
            config: The configuration; its mode is used.
            executor: The node; None in a daemon that decides nothing.
            suppression: Returns the part that keeps BE (best effort) pods within limits; None if there is
                none.
        """
        self._config = config
        self._executor = executor
        self._suppression = suppression
        self._made: Release | None = None
        if executor is not None:
            import proxy.release.service  # noqa: F401  it imports this module

    def recover(self, entries: Mapping[str, Mapping[str, object]]) -> None:
        """Continue the last daemon's release, whatever the mode; called before any container is moved."""
        if RELEASE_RECORD in entries and self._executor is not None:
            self.get().recover(entries[RELEASE_RECORD])

    @property
    def _idle_mode(self) -> str:
        """The mode if it moves no containers; otherwise empty."""
        if self._executor is None:
            return self._config.mode.value
        state = self._executor.state
        return "" if state.mode.in_release or state.mode.enforces else state.mode.value

    def get(self) -> Release:
        """Return the release of a daemon that decides."""
        assert self._executor is not None
        if self._made is None:
            from proxy.release.service import Release

            self._made = Release(self._executor, self._suppression_is_off)
        return self._made

    def _suppression_is_off(self) -> bool:
        suppression = self._suppression()
        return suppression is None or not suppression.known.written

    def routes(self) -> Mapping[str, Route]:
        """Return the handlers of read requests at the admin socket."""
        return {"/release": self.answer}

    def actions(self) -> Mapping[str, Route]:
        """Return the handlers of requests at the admin socket that change something."""
        return {"/release/start": self._start, "/release/undo": self._undo}

    def answer(self) -> dict[str, object]:
        """Return how far the release has come."""
        page: dict[str, object] = {"schema": schema_ids.RELEASE, "stage": ""}
        if mode := self._idle_mode:
            return {**page, "nothing": NOTHING.format(mode=mode, advice=ADVICE[mode])}
        return {**page, **(self._made.page() if self._made is not None else {})}

    async def _start(self) -> dict[str, object]:
        if not self._idle_mode:
            await self.get().begin()
        return self.answer()

    async def _undo(self) -> dict[str, object]:
        if self._executor is None:
            raise InputError(NO_LEDGER)
        if mode := self._idle_mode:
            raise InputError(f"cannot undo the release: the node is not released (mode {mode})")
        await self.get().undo()
        return self.answer()

    def page(self) -> dict[str, object]:
        """Return what ``topoproxy status`` shows: nothing without a release."""
        if self._made is None or not self._made.stage:
            return {}
        return {"mode": self._made.stage, "release": self._made.page()}

    async def at_stop(self, limit: float) -> None:
        """Release everything before the daemon ends, within this many seconds; the next takes over again."""
        if self._idle_mode or self._executor is None:
            return
        release = self.get()
        await release.begin(lasting=False)
        if not await release.finish(limit):
            remaining = "; ".join(map(str, release.progress.remaining.values()))
            self._executor.telemetry.problem(
                "cannot release the node before the shutdown in time", seconds=limit, err=remaining
            )

    async def stop(self) -> None:
        """Stop the running work; the next daemon continues from the record."""
        if self._made is not None:
            await self._made.stop()

    def close(self) -> None:
        """End the worker."""
        if self._made is not None:
            self._made.close()
