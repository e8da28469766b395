"""Staged enforcement in a daemon: its status; the steps are imported when the first one is due."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from proxy.engine.enforcement import counts
from proxy.model import schema_ids
from proxy.model.errors import InputError

if TYPE_CHECKING:
    from proxy.admin.server import Route
    from proxy.executor.node_executor import NodeExecutor
    from proxy.staging.service import StagedEnforcement


class LazyStaging:
    """The staged enforcement of a daemon."""

    def __init__(self, executor: NodeExecutor) -> None:
        """Prepare; no step is made yet.

        Args:
            executor: The node.
        """
        self._executor = executor
        self._made: StagedEnforcement | None = None

    async def run(self) -> None:
        """Make the steps that are due, until cancelled."""
        executor = self._executor
        while self._made is None:
            await executor.enforcement_step_due.wait()
            now = executor.state.enforcement
            if not (now.lagging or now.moving):
                executor.enforcement_step_due.clear()
                continue
            # kubelet's calls must not wait for an import.
            await asyncio.to_thread(importlib.import_module, "proxy.staging.service")
            from proxy.staging.service import StagedEnforcement

            self._made = StagedEnforcement(executor)
        await self._made.run()

    def routes(self) -> Mapping[str, Route]:
        """Return the handlers of read requests at the admin socket."""
        return {"/enforce": self.answer}

    def actions(self) -> Mapping[str, Route]:
        """Return the handlers of requests at the admin socket that change something."""
        return {
            "/enforce/pause": lambda: self._set_paused(paused=True),
            "/enforce/resume": lambda: self._set_paused(paused=False),
        }

    def answer(self) -> dict[str, object]:
        """Return the page of ``topoproxy enforce status``."""
        return {"schema": schema_ids.ENFORCE, **self.page()}

    def _set_paused(self, *, paused: bool) -> dict[str, object]:
        """Pause before the next step, or continue.

        Raises:
            InputError: The node is released: there are no steps.
        """
        if self._executor.state.mode.in_release:
            raise InputError(f"cannot {'pause' if paused else 'resume'} enforcement: the node is released")
        self._executor.pause_enforcement(paused=paused)
        return self.answer()

    def page(self) -> dict[str, object]:
        """Return how far the plan is applied."""
        state, options = self._executor.state, self._executor.options
        pods, problems = counts(state), {} if self._made is None else self._made.problems()
        existing = {c.pod.key: c.pod.ref for c in state.containers.values()}
        return {
            "mode": state.mode.value,
            "paused": state.enforcement.paused,
            "selection": state.enforcement.selection.dump(),
            "podsPerStep": options.pods_per_step,
            "stepPeriod": options.step_period,
            "pods": {
                "enforced": pods.applied,
                "observed": pods.observed,
                "toEnforce": pods.to_apply,
                "toGiveBack": pods.to_give_back,
                "inStep": pods.moving,
            },
            "observedContainers": pods.observed_containers,
            "problems": [
                {"pod": existing[key], "reason": why} for key, why in problems.items() if key in existing
            ],
        }

    def close(self) -> None:
        """End the worker."""
        if self._made is not None:
            self._made.close()


def _refusing_route(do: str) -> Route:
    """Return a route of a daemon that decides nothing."""

    def refuse() -> dict[str, object]:
        raise InputError(f"cannot {do} enforcement: in passthrough mode nothing is decided")

    return refuse


PASSTHROUGH_ROUTES: Mapping[str, Route] = {"/enforce": _refusing_route("show")}
PASSTHROUGH_ACTIONS: Mapping[str, Route] = {
    "/enforce/pause": _refusing_route("pause"),
    "/enforce/resume": _refusing_route("resume"),
}
"""The answer of the admin socket in mode passthrough."""
