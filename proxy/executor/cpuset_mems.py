"""Memory nodes of running containers: compared at each reconcile, repaired if no memory has to move.

``proxy.engine.cpuset_mems`` decides what is repaired. All of this runs in a thread of its own, never in the
thread of kernel writes: no create waits for it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.engine.cpuset_mems import MemoryBindings, repair
from proxy.engine.enforcement import applies_to
from proxy.engine.node_events import MemoryNodesCompared
from proxy.executor.background import Worker
from proxy.executor.context import NodeContext
from proxy.model.errnos import GONE
from proxy.model.errors import CgroupError
from proxy.model.idset import Mask
from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

if TYPE_CHECKING:
    from proxy.executor.kernel_ports import MemoryTree, MemoryUse

MIB = 1 << 20
NOT_REPAIRED = "cannot repair the memory nodes of a container"


@dataclass(slots=True)
class MemsCheck:
    """What a comparison found.

    Attributes:
        right: Containers that have the right nodes (perhaps again, after a repair), with these nodes.
        repaired: Ids of the containers that were written.
        wide: Containers that have too many nodes, with all nodes that they have.
        failed: Containers that could not be bound, and why.
    """

    right: dict[str, Mask] = field(default_factory=dict)
    repaired: list[str] = field(default_factory=list)
    wide: dict[str, Mask] = field(default_factory=dict)
    failed: list[tuple[Container, str]] = field(default_factory=list)


class CpusetMems:
    """Compares and repairs memory nodes.

    Attributes:
        worker: Does the blocking work of this class, and reads the machine.
        memory: Reads where memory is; None if nothing does, and then no container is narrowed.
    """

    def __init__(self, context: NodeContext, memory: MemoryTree | None = None) -> None:
        self._context = context
        self.worker = Worker("mems", context.report_internal_error)
        context.health.watch(self.worker)
        self.memory = memory
        self._failed = set[str]()

    @property
    def known(self) -> MemoryBindings:
        """The known facts about memory nodes."""
        return self._context.state.facts.mems

    def renewed(self, container: Container) -> Mask | None:
        """Return the nodes for an update of our own; None if those that the runtime has saved suffice."""
        return self.known.renewed(self._context.state, container)

    def carried(self, container: Container) -> Mask:
        """Return the nodes that a call to the runtime names for a container, so that it loses none."""
        return self.known.carried(self._context.state, container)

    async def once(self) -> None:
        """Compare the memory nodes of all running containers with the kernel."""
        context, held = self._context, self.known.as_planned
        state = context.state
        running = [
            c for c in state.containers.values() if c.phase is Phase.RUNNING and applies_to(state, c.pod)
        ]
        result = await self.worker.run(self._check, running)
        for container_id in self._failed & result.right.keys():
            context.telemetry.resolved(NOT_REPAIRED, containerID=container_id)
        failed = {container.id for container, _ in result.failed}
        self._forget_failures(self._failed - result.right.keys() - failed)
        self._failed = failed
        for container, message in result.failed:
            context.telemetry.problem(NOT_REPAIRED, **subject(container), err=message)
        drifted = [i for i in {*result.repaired, *result.wide} if i in held]
        context.telemetry.count(metrics.MEMS_REPAIRED, len(result.repaired))
        if drifted:
            context.telemetry.count(metrics.MEMS_DRIFT, len(drifted))
            refs = sorted(c.ref for i in drifted if (c := context.state.containers.get(i)))
            context.telemetry.warning(
                "drift: another program wrote memory nodes", containers=", ".join(refs[:5])
            )
        # A resize may have changed what containers should have since they were compared.
        newest = context.state
        right = {c.id for c in newest.existing(result.right) if newest.desired_mems(c) == result.right[c.id]}
        context.store.handle(MemoryNodesCompared(frozenset(right), result.wide))

    def forget_failures(self) -> None:
        """Remove all problems of repairs: the plan is not applied to the node."""
        self._forget_failures(self._failed)
        self._failed = set()

    def _forget_failures(self, container_ids: Collection[str]) -> None:
        """Remove the problems of containers that no longer need the repair."""
        for container_id in container_ids:
            self._context.telemetry.forget(NOT_REPAIRED, containerID=container_id)

    # -- in the worker ------------------------------------------------------------------------------------

    def _check(self, running: list[Container]) -> MemsCheck:
        result = MemsCheck()
        for known in running:
            state = self._context.state
            container = state.containers.get(known.id)  # a resize may have changed its nodes since
            if container is None or container.phase is not Phase.RUNNING:
                continue  # it has ended by now
            if not applies_to(state, container.pod):
                continue  # the plan no longer applies to it
            try:
                self._one(container, result)
            except CgroupError as error:
                if error.errno not in GONE:
                    result.failed.append((container, str(error)))
        return result

    def _one(self, container: Container, result: MemsCheck) -> None:
        state, known, cgroups = self._context.state, self.known, self._context.cpuset_writer.cgroups
        path = self._context.cpuset_writer.known_path(container)
        if path is None:
            return
        has, want = cgroups.memory_nodes(path), state.desired_mems(container)
        if not has and not (known.is_changed and cgroups.version == 1):
            return  # it has its parent's nodes: no program has bound it
        above = want if has == want else cgroups.read(path.rpartition("/")[0]).effective_mems
        done = repair(has, want, above, state.node.machine.memory_nodes, known.returned)
        if done.write is not None:
            cgroups.write(path, None, done.write)
        if done.is_drift:
            result.repaired.append(container.id)
        if done.is_as_planned:
            result.right[container.id] = want
        elif done.write is not None:
            result.wide[container.id] = done.write
        if done.narrow is not None:
            self._narrow(container, path, done.write or has, done.narrow, result)

    def _narrow(self, container: Container, path: str, has: Mask, want: Mask, result: MemsCheck) -> None:
        result.wide[container.id] = has  # even if its memory cannot be read
        use = self._use(container)
        firm, cache = use.outside(want) if use is not None else (0, 0)
        if use is not None and not firm and not cache:
            self._context.cpuset_writer.cgroups.write(path, None, want)
            result.repaired.append(container.id)
            result.right[container.id] = want
            del result.wide[container.id]
            return
        where = "it is not known where its memory is"
        if use is not None:
            where = f"it has {_size(firm)} there, and {_size(cache)} of page cache"
        message = (
            f"cannot bind it to memory of nodes {want} again: it was given {has - want} too, and {where}"
        )
        result.failed.append((container, message))

    def _use(self, container: Container) -> MemoryUse | None:
        return (
            None if self.memory is None else self.memory.memory_use(container.pod.cgroup_parent, container.id)
        )

    # -- status page --------------------------------------------------------------------------------------

    async def page(self) -> dict[str, object]:
        """Return where the memory of all containers is; reads three files of each."""
        running = [c for c in self._context.state.containers.values() if c.phase is Phase.RUNNING]
        running.sort(key=lambda c: (c.ref, c.id))
        return {"containers": await self.worker.run(lambda: [r for c in running if (r := self._row(c))])}

    def _row(self, container: Container) -> dict[str, object] | None:
        writer = self._context.cpuset_writer
        path = writer.known_path(container)
        path = path or writer.cgroups.find(container.pod.cgroup_parent, container.id)
        if path is None:
            return None
        applied = applies_to(self._context.state, container.pod)
        row: dict[str, object] = {
            "id": container.id,
            "ref": container.ref,
            "decided": str(container.placement.mems) if applied else "",
        }
        try:
            row["nodes"] = str(writer.cgroups.read(path).effective_mems)
            use = self._use(container)
        except CgroupError as error:
            return None if error.errno in GONE else {**row, "problem": str(error)}
        if use is None:
            return {**row, "problem": "the memory controller has no group for it"}
        found: dict[str, object] = {"anon": dict(use.anon), "file": dict(use.file), "huge": dict(use.huge)}
        found["migrates"] = self.memory is not None and self.memory.migrates_pages(path)
        if not applied:
            return {**row, **found}
        firm, cache = use.outside(container.placement.mems)
        return {**row, **found, "outside": firm, "outsideFile": cache}

    def close(self) -> None:
        """End the worker."""
        self.worker.close()


def _size(size: int) -> str:
    return f"{size / MIB:.1f} MiB" if size >= MIB / 10 else f"{size} bytes"
