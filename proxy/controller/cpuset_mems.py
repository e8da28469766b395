"""Memory nodes of containers that run: compared in each pass, repaired where that costs nobody memory.

Theory. The nodes of a container are decided with its create and stay: its memory is there. So all that can
differ is drift, somebody else's write. What that write did to the pages is done already
(``backends.cgroup.memory``):

* nodes that are missing are given back, always. Wider nodes move no page and take milliseconds.
* nodes that are too many are taken away only where the container has no memory on them: on v2 the kernel
  would move it within the write, which takes seconds, and a group that may not hold it dies of that. Else it
  is told, with how much is there, and looked at again in each pass. Until then nothing of ours narrows it
  either: updates that pass, and our own, name the nodes that it has (``told``).

Nodes may go, memory by memory (``hotplug``). Who was bound to one has what is left of his nodes, or any where
nothing is; no call names a node that is gone, which the kernel refuses. On v1 the kernel takes a node that
goes out of all groups and does not put it back, so those above a container are widened when it has returned.

All of it runs in a thread of its own, never in that of kernel writes: nothing here is before a create. A
group whose parent has fewer nodes than was decided has those of the parent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.controller.context import NodeContext
from proxy.controller.worker import Worker
from proxy.model.errnos import GONE
from proxy.model.errors import CgroupError
from proxy.model.idset import Mask
from proxy.model.workload import Container, Phase
from proxy.telemetry import metrics
from proxy.telemetry.port import subject

if TYPE_CHECKING:
    from proxy.controller.kernel_ports import MemoryTree, MemoryUse

MIB = 1 << 20


@dataclass(slots=True)
class Looked:
    """What a look found.

    Attributes:
        right: Ids of containers that have what they should, or have it again.
        repaired: Ids of those that were written.
        wide: Those that have too many nodes, with all that they have.
        failed: Those that could not be bound, and why.
    """

    right: set[str] = field(default_factory=set)
    repaired: list[str] = field(default_factory=list)
    wide: dict[str, Mask] = field(default_factory=dict)
    failed: list[tuple[Container, str]] = field(default_factory=list)


class CpusetMems:
    """Looks after memory nodes.

    Attributes:
        worker: Who does what blocks here, and looks at the machine.
        memory: Tells where memory is; None where nobody does: then nobody is narrowed.
        wide: Who has more nodes than decided, because his memory is there: all that he has.
    """

    def __init__(self, context: NodeContext, memory: MemoryTree | None = None) -> None:
        self._context = context
        self.worker = Worker("mems", context.broken)
        context.health.watch(self.worker)
        self._held: set[str] = set()
        self.memory = memory
        self.wide: Mapping[str, Mask] = {}
        self._returned = Mask()
        self._changed = False

    def changed(self, returned: Mask) -> None:
        """Memory nodes came or went; what containers have now is nobody's doing.

        Args:
            returned: Those that came.
        """
        self.forget()
        self._changed = True
        self._returned |= returned

    def renewed(self, container: Container) -> Mask | None:
        """Give the nodes that an update of our own names; None where those that the runtime has saved do."""
        gone = not container.placement.mems <= self._context.state.node.machine.memory_nodes
        return self.told(container) if self._changed or gone or container.id in self.wide else None

    def forget(self) -> None:
        """Forget who had what: it may be given anew by now."""
        self._held, self.wide = set(), {}

    def told(self, container: Container) -> Mask:
        """Give the nodes that a call to the runtime names for a container: no runtime takes others."""
        state = self._context.state
        wide = self.wide.get(container.id, Mask()) & state.node.machine.memory_nodes
        return wide or state.wanted_mems(container)

    async def once(self) -> None:
        """Compare all that run with the kernel."""
        context = self._context
        some = [c for c in context.state.containers.values() if c.phase is Phase.RUNNING]
        looked = await self.worker.run(self._look, some)
        self.wide = looked.wide
        for container, why in looked.failed:
            context.telemetry.problem(
                "cannot repair the memory nodes of a container", **subject(container), err=why
            )
        drifted = [i for i in (*looked.repaired, *looked.wide) if i in self._held]
        context.telemetry.count(metrics.MEMS_REPAIRED, len(looked.repaired))
        if drifted:
            context.telemetry.count(metrics.MEMS_DRIFT, len(drifted))
            refs = sorted(c.ref for i in drifted if (c := context.state.containers.get(i)))
            context.telemetry.warning(
                "drift: another program wrote memory nodes", containers=", ".join(refs[:5])
            )
        self._held = looked.right

    # -- in the worker ------------------------------------------------------------------------------------

    def _look(self, some: list[Container]) -> Looked:
        looked = Looked()
        for container in some:
            if self._context.store.mode.is_leaving:
                break
            try:
                self._one(container, looked)
            except CgroupError as error:
                if error.errno not in GONE:
                    looked.failed.append((container, str(error)))
        return looked

    def _one(self, container: Container, looked: Looked) -> None:
        cgroups = self._context.enforcer.cgroups
        path = self._context.enforcer.known_path(container)
        if path is None:
            return
        has = cgroups.nodes(path)
        if not has and not (self._changed and cgroups.version == 1):
            return  # as its parent: nobody has bound it
        want = self._context.state.wanted_mems(container)
        if has != want:
            above = cgroups.read(path.rpartition("/")[0]).effective_mems
            want = want if want - above <= self._returned else want & above or has
        there = self._context.state.node.machine.memory_nodes
        if not has <= there:  # no memory is left on nodes that are gone
            has = has & there | want
            cgroups.write(path, None, has)
        if has == want:
            looked.right.add(container.id)
        elif want - has:
            cgroups.write(path, None, has | want)
            looked.repaired.append(container.id)
            if has <= want:
                looked.right.add(container.id)
        else:
            self._narrow(container, path, has, want, looked)

    def _narrow(self, container: Container, path: str, has: Mask, want: Mask, looked: Looked) -> None:
        use = self._use(container)
        firm, cache = use.outside(want) if use is not None else (0, 0)
        if use is not None and not firm and not cache:
            self._context.enforcer.cgroups.write(path, None, want)
            looked.repaired.append(container.id)
            looked.right.add(container.id)
            return
        looked.wide[container.id] = has
        where = "nobody can tell where its memory is"
        if use is not None:
            where = f"it has {_size(firm)} there, and {_size(cache)} of page cache"
        why = f"cannot bind it to memory of nodes {want} again: it was given {has - want} too, and {where}"
        looked.failed.append((container, why))

    def _use(self, container: Container) -> MemoryUse | None:
        return None if self.memory is None else self.memory.use(container.pod.cgroup_parent, container.id)

    # -- for people ---------------------------------------------------------------------------------------

    async def page(self) -> dict[str, object]:
        """Tell where the memory of all containers is; reads three files of each."""
        some = [c for c in self._context.state.containers.values() if c.phase is Phase.RUNNING]
        some.sort(key=lambda c: (c.ref, c.id))
        return {"containers": await self.worker.run(lambda: [r for c in some if (r := self._row(c))])}

    def _row(self, container: Container) -> dict[str, object] | None:
        enforcer = self._context.enforcer
        path = enforcer.known_path(container)
        path = path or enforcer.cgroups.find(container.pod.cgroup_parent, container.id)
        if path is None:
            return None
        row: dict[str, object] = {
            "id": container.id,
            "ref": container.ref,
            "decided": str(container.placement.mems),
        }
        try:
            row["nodes"] = str(enforcer.cgroups.read(path).effective_mems)
            use = self._use(container)
        except CgroupError as error:
            return None if error.errno in GONE else {**row, "problem": str(error)}
        if use is None:
            return {**row, "problem": "the memory controller has no group for it"}
        firm, cache = use.outside(container.placement.mems)
        found = {"anon": dict(use.anon), "file": dict(use.file), "huge": dict(use.huge)}
        moves = self.memory is not None and self.memory.migrates(path)
        return {**row, **found, "outside": firm, "outsideFile": cache, "migrates": moves}

    def close(self) -> None:
        """End the worker."""
        self.worker.close()


def _size(size: int) -> str:
    return f"{size / MIB:.1f} MiB" if size >= MIB / 10 else f"{size} bytes"
