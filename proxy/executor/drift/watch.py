"""Watches the cpusets of live containers: the kernel reports a write, and the container is compared.

The cgroup of each live container is watched; on cgroup v2 also the groups above it, as their cpusets limit
what takes effect. Whether topoproxy itself wrote does not matter: the value is compared, and a right one
costs one read. After a report no more reports are taken for a moment, so that many writes cost one
comparison, unless a container is confined (``proxy.executor.confinement``). A group is not watched while
all containers below it have write conflicts (``engine.write_conflicts``): then they are compared on a timer.

If the kernel refuses a watch, comparisons on timers replace it; the refusal is reported once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Container, Iterable
from typing import TYPE_CHECKING

from proxy.executor.context import NodeContext
from proxy.model.errors import CgroupError
from proxy.telemetry import metrics

if TYPE_CHECKING:
    from proxy.executor.kernel_ports import WriteEvents

MOMENT_S = 0.02
NOT_WATCHED = "cannot watch the writes to all cpusets: those not watched are compared periodically"


class WriteWatch:
    """Watches the groups of containers.

    Attributes:
        writes: Reports writes; None if nothing does.
        refused: Why some groups are not watched; empty if all are.
    """

    def __init__(
        self,
        context: NodeContext,
        compare_soon: Callable[[Iterable[str] | None], None],
        conflicting: Callable[[], Container[str]],
        writes: WriteEvents | None = None,
    ) -> None:
        """Watch nothing yet; nothing is reported before ``start``.

        Args:
            context: Has the containers.
            compare_soon: Called with the containers that may have been written; None for all.
            conflicting: Returns the ids of containers with a write conflict.
            writes: The kernel's reports of writes; None if there are none.
        """
        self._context = context
        self._compare_soon = compare_soon
        self._conflicting = conflicting
        self._first: Callable[[Iterable[str]], bool] = lambda ids: False
        self.writes = writes
        self.refused = "the kernel does not report writes" if writes is None else ""
        self._paths: dict[str, str] = {}
        self._containers: dict[str, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._later: asyncio.TimerHandle | None = None

    def report_first(self, written: Callable[[Iterable[str]], bool]) -> None:
        """Report writes to a function first; it returns whether further reports must not be delayed."""
        self._first = written

    # -- the kernel's worker ------------------------------------------------------------------------------

    def arm(self, groups: Iterable[tuple[str, str]], *, again: bool = False) -> list[str]:
        """Watch the groups of containers.

        Args:
            groups: Container ids with the paths of their groups.
            again: Also watch those that are watched already: their groups may have been replaced.

        Returns:
            Ids of those that are watched from now on.
        """
        writes = self.writes
        if writes is None or (self.refused and not again):
            return []
        self.refused, new = "", list[str]()
        above: set[str] = set()
        for container_id, path in groups:
            known = self._paths.get(container_id) == path
            if known and not again:
                continue
            if not known:
                self._forget(container_id)
            # Recorded before the watch begins: a reported group without a record would be unwatched.
            self._paths[container_id], self._containers[path] = path, container_id
            try:
                is_watched = self._watch(writes, path, above)
            except CgroupError as error:
                self._forget(container_id)
                self._refuse(error)
                break
            if not is_watched:
                self._forget(container_id)
            elif not known:
                new.append(container_id)
        return new

    def _watch(self, writes: WriteEvents, path: str, above: set[str]) -> bool:
        if not writes.watch(path):
            return False
        for group in self._bounds(path):
            if group not in above:
                above.add(group)
                writes.watch(group)
        return True

    def _forget(self, container_id: str) -> str | None:
        path = self._paths.pop(container_id, None)
        if path is not None:
            self._containers.pop(path, None)
        return path

    def _bounds(self, path: str) -> list[str]:
        """Return the groups above one that limit its cpuset, without the root."""
        if self._context.cpuset_writer.cgroups.version == 1:
            return []  # on v1 a group cannot be narrower than those in it
        parts = path.split("/")
        return ["/".join(parts[:count]) for count in range(1, len(parts))]

    def _refuse(self, error: CgroupError) -> None:
        self.refused = str(error)
        period = self._context.options.reconcile_period
        self._context.telemetry.problem(NOT_WATCHED, seconds=period / 2, err=error)

    # -- the loop -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start listening."""
        if self.writes is not None and self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self.writes, self._written)

    def _listen(self) -> None:
        self._later = None
        if self.writes is not None and self._loop is not None:
            self._loop.add_reader(self.writes, self._written)

    def _written(self) -> None:
        """Read the reports of writes, and compare the affected containers."""
        writes, loop = self.writes, self._loop
        if writes is None or loop is None:
            return
        groups = writes.read_events()
        affected = None if groups is None else self._affected(writes, groups)
        if not self._first(affected if affected is not None else self._context.state.inflight.confined):
            loop.remove_reader(writes)
            self._later = loop.call_later(MOMENT_S, self._listen)
        if affected is None:
            self._context.telemetry.count(metrics.CPUSET_WATCH_OVERFLOWS)
        if affected is None or affected:
            self._compare_soon(affected)

    def _affected(self, writes: WriteEvents, groups: Collection[str]) -> list[str]:
        """Return the containers that a write to the cpusets of some groups may have affected."""
        conflicting, affected = self._conflicting(), list[str]()
        for group in groups:
            own = self._containers.get(group)
            below = (
                [own]
                if own is not None
                else [i for i, p in self._watched_paths() if p.startswith(f"{group}/")]
            )
            suspects = [container_id for container_id in below if container_id not in conflicting]
            affected += suspects
            if not suspects:
                writes.unwatch(group)
        return affected

    def _watched_paths(self) -> list[tuple[str, str]]:
        """Return the watched containers and their groups; another thread may add some meanwhile."""
        return list(self._paths.items())

    def drop(self, container_id: str) -> None:
        """Stop watching a container's group, until it is armed again."""
        path = self._forget(container_id)
        if path is not None and self.writes is not None:
            self.writes.unwatch(path)

    def keep(self, containers: Collection[str]) -> None:
        """Stop watching all containers but these."""
        for container_id in [i for i, _ in self._watched_paths() if i not in containers]:
            self.drop(container_id)
        if self.writes is not None:
            needed = {group for _, path in self._watched_paths() for group in (path, *self._bounds(path))}
            for group in self.writes.watched() - needed:
                self.writes.unwatch(group)

    def covers(self, ids: Iterable[str]) -> bool:
        """Return whether all these containers are watched."""
        return self.writes is not None and all(container_id in self._paths for container_id in ids)

    def page(self) -> dict[str, object]:
        """Return what ``topoproxy status`` shows."""
        return {"watched": len(self._paths), "not_watched": self.refused}

    def close(self) -> None:
        """Stop listening."""
        if self._later is not None:
            self._later.cancel()
        writes, self.writes = self.writes, None
        if writes is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(writes)
            writes.close()
