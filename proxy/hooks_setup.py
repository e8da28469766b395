"""Makes the parts for hooks, if there are hooks.

Most nodes have no hooks. On those nodes nothing of ``proxy.hooks`` is in memory: a thread only scans three
directories a few times a second. As soon as there is a file that may be a hook, the engine, the registry and
the hook bridge are made and connected; they stay as long as the daemon runs.

Calls that arrive before the hooks of the first scan are in use wait for them: no container may bypass the
hooks after a restart. This wait has a limit, because a hook may take long to load.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from proxy.calls.call_flow import CallFlow
    from proxy.config.hooks import HooksConfig
    from proxy.executor.node_executor import NodeExecutor
    from proxy.frontends.hookserver.server import HookServerRunner
    from proxy.hook_assembly import HookParts
    from proxy.hooks.engine.engine import HookEngine
    from proxy.hooks.registry import HookRegistry

POLL_S: Final = 0.4
"""Seconds between two scans for a first hook, which must be in use within a second."""
FIRST_SCAN_WAIT_S: Final = 10.0
"""The most seconds that calls wait for the hooks that exist at a start."""
STOP_S: Final = 8.0
"""Seconds that hooks may take after they are notified that the daemon ends."""


class DaemonHooks:
    """The hooks of a daemon.

    Attributes:
        config: The section ``hooks`` of the configuration.
        server: Offers our own placement as a hook server; None if that is not configured.
    """

    def __init__(
        self,
        config: HooksConfig,
        executor: NodeExecutor,
        flow: CallFlow,
        marks: Path | None = None,
    ) -> None:
        """Call no hooks yet; calls wait until ``run`` has made its first scan.

        Args:
            config: The directories of hooks, and how hooks are called.
            executor: The executor of the node.
            flow: Decides calls.
            marks: The directory that records which file is being loaded.
        """
        self.config = config
        self.server: HookServerRunner | None = None
        self._executor = executor
        self._flow = flow
        self._marks = marks
        self._parts: HookParts | None = None
        self._ready = asyncio.Event()
        if config.enabled:
            flow.hooks_ready = self._ready

    @property
    def engine(self) -> HookEngine | None:
        """The engine that calls hooks; None while there are no hooks."""
        return None if self._parts is None else self._parts.engine

    @property
    def registry(self) -> HookRegistry | None:
        """The state of the hook files; None while there are none."""
        return None if self._parts is None else self._parts.registry

    def reconfigure(self, config: HooksConfig) -> None:
        """Use other directories and settings from now on."""
        self.config = config
        if self._parts is not None:
            self._parts.registry.reconfigure(config)

    # -- run ----------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Offer our placement as a hook server, if that is configured."""
        if self.config.serve is None:
            return
        if self.server is None:
            await asyncio.to_thread(importlib.import_module, "proxy.frontends.hookserver.server")
            from proxy.frontends.hookserver.server import HookServerRunner

            self.server = HookServerRunner(self.config.serve, self._executor, self._flow)
        await self.server.run()

    async def run(self) -> None:
        """Wait for a first hook, and then follow the files in the directories."""
        if not self.config.enabled:
            return
        # A directory may hang (its file server is gone); calls must not wait for it without a limit.
        late = asyncio.get_running_loop().call_later(2 * FIRST_SCAN_WAIT_S, self._release_calls)
        try:
            while self._parts is None:
                if await asyncio.to_thread(may_have_hooks, self.config):
                    await self._connect()
                else:
                    self._release_calls()
                    await asyncio.sleep(POLL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_SCAN_WAIT_S):
                    await self._executor.reconciled.wait()
                    await self._parts.backfill.look_up()
                    await self._parts.registry.scan_once(FIRST_SCAN_WAIT_S)
        finally:
            late.cancel()
            self._release_calls()
        if not self._executor.reconciled.is_set():
            self._executor.spawn(self._parts.backfill.when_reconciled())
        await self._parts.registry.run()

    def _release_calls(self) -> None:
        """End the wait of calls for hooks."""
        self._ready.set()
        self._flow.hooks_ready = None

    async def _connect(self) -> None:
        """Make the parts that hooks need, and connect them."""
        # The import takes a tenth of a second; in a thread it does not delay calls.
        await asyncio.to_thread(importlib.import_module, "proxy.hook_assembly")
        from proxy.hook_assembly import hook_parts_of

        self._parts = hook_parts_of(self.config, self._executor, self._flow, self._marks)

    # -- status -------------------------------------------------------------------------------------------

    def page(self) -> dict[str, object]:
        """Return the part of ``topoproxy status`` about hooks."""
        parts, page = self._parts, dict[str, object]()
        if parts is not None:
            from proxy.hooks.status_data import hooks_page

            page["hooks"] = hooks_page(parts.registry.entries, parts.engine.report())
        if self.server is not None:
            page["serving"] = {"socket": str(self.server.path), "listening": self.server.listening}
        return page

    # -- the end ------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Notify hooks that the daemon ends, and stop their workers; ``run`` has been cancelled."""
        self._release_calls()
        server, self.server = self.server, None
        if server is not None:
            await server.stop()
        parts = self._parts
        if parts is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await parts.registry.close()
        parts.engine.close()
        for worker in (parts.updates, parts.backfill):
            await asyncio.to_thread(worker.close)


def may_have_hooks(config: HooksConfig) -> bool:
    """Return whether there is a file that may be a hook; runs in a thread."""
    directories = (
        (config.directory, ".py"),
        (config.vendor_directory, ".py"),
        (config.server_directory, "json"),
    )
    return any(path is not None and _has_entry(path, ending) for path, ending in directories)


def _has_entry(directory: Path, ending: str) -> bool:
    try:
        with os.scandir(directory) as entries:
            return any(entry.name.endswith(ending) for entry in entries)
    except OSError:
        return False
