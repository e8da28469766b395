"""Queries the runtime for the cgroups of running containers that were not found by name.

This is a cold path, off the path of calls: a few containers in each comparison, each query with the runtime's
own deadline. A path that is found becomes part of the container, and so of the ledger: it is not queried
again. A container without a cgroup of its own (a virtual machine) is reported once, with the reason, and its
CPUs are not controlled.

This module also holds what is known of the cgroup hierarchy and of its driver. The runtime reports the driver
since CRI 1.28; with an older runtime it is derived from the cgroup parents of the pods.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from proxy.engine.container_events import ContainersUpdated
from proxy.executor.context import NodeContext
from proxy.executor.kernel_ports import GroupLocator, Located
from proxy.executor.kernel_writes import KernelWrites
from proxy.executor.runtime_ports import Runtime
from proxy.executor.worker import Worker
from proxy.model.errors import RuntimeCallError, TopoproxyError, UnavailableError
from proxy.model.workload import Phase
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

AT_ONCE = 16
"""How many containers the runtime is queried about in one comparison."""
SELDOM = 32
SILENT_LIMIT = 2


class CgroupLocator:
    """Locates the cgroups of containers.

    Attributes:
        places: Finds a cgroup by the runtime's answer; None where nothing does.
        driver: ``cgroupfs`` or ``systemd`` as the runtime reports it; empty where it does not.
        absent: Ids of containers with a cgroup that was looked for and not found, since the last comparison.
        why: By id, why the runtime's answer did not help.
    """

    def __init__(
        self, context: NodeContext, writes: KernelWrites, places: GroupLocator | None = None
    ) -> None:
        self._context = context
        writes.subscribe(lambda done: self.absent.update(done.absent))
        self.places = places
        self.driver = ""
        self.absent: set[str] = set()
        self.why: dict[str, str] = {}
        self._rounds = 0

    def recall(self) -> None:
        """Pass the paths in the ledger to all cgroup trees; costs a few stat calls per such container."""
        for container in self._context.state.containers.values():
            if container.cgroup and self.places is not None:
                self.places.remember(container.id, container.cgroup, container.pod.cgroup_parent)

    async def ask_driver(self, worker: Worker) -> None:
        """Query the runtime for its cgroup driver, which is only displayed."""
        try:
            self.driver = await worker.run(self._context.runtime.cgroup_driver)
        except TopoproxyError as error:
            self._context.telemetry.debug("cannot read the cgroup driver from the runtime", err=error)

    async def find(self, running: Iterable[str], worker: Worker) -> list[str]:
        """Ask about containers without a cgroup; rarely about those for which the last query did not help.

        Args:
            running: The containers that run according to the runtime; others have no cgroup yet or no longer.
            worker: Does the blocking work.

        Returns:
            Ids of the containers that have been found now: their cpusets are to be written.
        """
        context, places = self._context, self.places
        self._rounds += 1
        self.why = {k: v for k, v in self.why.items() if k in context.state.containers}
        there = {i for i in running if i in context.state.containers}
        again = self._rounds % SELDOM == 0
        some = sorted(i for i in self.absent & there if again or i not in self.why)[:AT_ONCE]
        self.absent.difference_update(some)
        self.absent &= there
        if places is None or not some:
            return []
        found = await worker.run(_ask, context.runtime, places, some)
        moved: list[str] = []
        for container_id, at in found.items():
            container = context.state.containers.get(container_id)
            if container is None or container.phase is Phase.EXITED:
                continue
            if not at.path:
                self.why[container_id] = at.why
                continue
            self.why.pop(container_id, None)
            known = structs.replace(container, cgroup=at.path)
            context.store.handle(ContainersUpdated((known,), "cgroup located"))
            context.telemetry.count(metrics.CGROUPS_LOCATED)
            context.telemetry.event(
                "found a cgroup by the container's first process", **subject(container), path=f"/{at.path}"
            )
            moved.append(container_id)
        return moved

    def page(self, version: int) -> dict[str, object]:
        """Return what ``topoproxy status`` shows."""
        parents = [pod.cgroup_parent for pod in self._context.state.pods.values() if pod.cgroup_parent]
        seen = ""
        if parents:
            seen = "systemd" if all(p.rstrip("/").endswith(".slice") for p in parents) else "cgroupfs"
        return {
            "version": version,
            "driver": self.driver or seen,
            "driver_from": "the runtime" if self.driver else "the pods' cgroup parents" if seen else "",
        }


def _ask(runtime: Runtime, places: GroupLocator, ids: list[str]) -> dict[str, Located]:
    """Query and locate, in a worker. A container that is gone or gets no answer is left for next time."""
    found: dict[str, Located] = {}
    silent = 0
    for container_id in ids:
        try:
            found[container_id] = places.locate(container_id, runtime.detail(container_id))
        except RuntimeCallError:
            continue
        except UnavailableError:
            silent += 1
            if silent >= SILENT_LIMIT:
                break
    return found
