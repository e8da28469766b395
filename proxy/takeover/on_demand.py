"""The takeover from kubelet; few nodes need it, so its code is loaded on demand, or if the ledger has one."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from proxy.model.errors import InputError

if TYPE_CHECKING:
    from proxy.admin.server import Route
    from proxy.config.schema import Config
    from proxy.executor.node_executor import NodeExecutor
    from proxy.executor.ports import Ledger
    from proxy.takeover.service import Takeover

TAKEOVER_RECORD = "t/takeover"
"""The key of the takeover in the ledger."""
STEPS = ("start", "finish", "revert")


class LazyTakeover:
    """Creates the takeover of a daemon on demand."""

    def __init__(self, config: Config, executor: NodeExecutor | None, ledger: Ledger | None) -> None:
        """Prepare; if the ledger has a takeover, it takes effect on the executor's rules at once.

        Args:
            config: The configuration, for paths.
            executor: The node, whose rules the takeover changes; None in a daemon that decides nothing.
            ledger: Keeps the record of the takeover; None if there is no ledger.
        """
        self._config = config
        self._executor = executor
        self._ledger = ledger
        self._made: Takeover | None = None
        if ledger is not None and TAKEOVER_RECORD in ledger.entries:
            self.get()

    def get(self) -> Takeover:
        """Return the takeover.

        Raises:
            InputError: This daemon decides nothing.
        """
        if self._executor is None:
            raise InputError("cannot take over: in passthrough mode nothing is decided")
        if self._made is None:
            from proxy.takeover.service import Takeover, TakeoverPaths
            from proxy.takeover.writer import TakeoverWriter

            directory, backups = self._config.kubelet.state_dir, self._config.state_dir / "takeover"
            paths = TakeoverPaths(directory, self._config.procfs_root)
            self._made = Takeover(self._executor, TakeoverWriter(self._ledger, directory, backups), paths)
            self._made.recover()
        return self._made

    def routes(self) -> Mapping[str, Route]:
        """Return the handlers of read requests at the admin socket."""
        return {"/takeover": self._page}

    def actions(self) -> Mapping[str, Route]:
        """Return the handlers of requests at the admin socket that change something."""
        return {f"/takeover/{step}": self._action(step) for step in STEPS}

    def _action(self, step: str) -> Route:
        async def act(params: Mapping[str, str]) -> dict[str, object]:
            await self._loaded()
            return await self.get().take_step(step, params)

        return act

    async def _page(self, params: Mapping[str, str]) -> dict[str, object]:
        await self._loaded()
        return await self.get().page(params)

    async def _loaded(self) -> None:
        """Import the code of a takeover in a thread: kubelet's calls must not wait for the import."""
        if self._made is None:
            await asyncio.to_thread(importlib.import_module, "proxy.takeover.service")

    def page(self) -> dict[str, object]:
        """Return what ``topoproxy status`` shows: nothing without a takeover."""
        if self._made is None or not self._made.record.chooses_cpus:
            return {}
        return {"takeover": self._made.record.stage.value}

    def close(self) -> None:
        """End the worker."""
        if self._made is not None:
            self._made.close()
