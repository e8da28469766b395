"""Three hundred containers leave a CPU, on real cgroups, compared with a bare loop: by itself, as root

    .venv/bin/python bench/moving_figures.py

The bare loop opens each group's ``cpuset.cpus``, writes it and closes it: the least that a program can do if
it knows the paths, and it reads nothing. It is compared with the work for which a create waits: finding the
containers that share, computing their CPUs, writing, and reading the value back. The loop with that read is
shown too. In each round all of them run once, in a changing order, and the medians are compared. The thread's
CPU time counts: nothing sleeps in it, and the time of other processes shows only in the time by the clock. A
last measurement has nothing to change: every group is read, and nothing is written. The run needs cgroup v1;
it makes a group for itself and removes it.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from figures import Figures
from table import number, render

from proxy.allocation.cpu_topology import CpuTopology
from proxy.backends.cgroup.cpuset import KernelCgroups, open_cgroups
from proxy.backends.cgroup.files import OsCgroupFiles
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.executor.cpuset_writer import CpusetWriter
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, Request
from proxy.topology.regular_machine import regular_machine

HEAD = (
    "300 containers leave a CPU (cgroup v1)",
    "bare loop",
    "and read back",
    "topoproxy",
    "ratio",
    "bar",
    "by the clock",
    "writes",
    "unchanged",
)
CONTAINERS, ROUNDS, BAR = 300, 60, 1.15
GROUP = f"topoproxy-bench-{os.getpid()}"


class CountingFiles(OsCgroupFiles):
    """Counts writes."""

    writes = 0

    def write(self, path: str, name: str, text: str) -> None:
        self.writes += 1
        super().write(path, name, text)

    def write_if_different(
        self,
        paths: Sequence[str],
        name: str,
        line: bytes,
        known: bytes | None = None,
        should_continue: Callable[[], bool] = lambda: True,
    ) -> list[bytes | None]:
        held = super().write_if_different(paths, name, line, known, should_continue)
        self.writes += sum(before != line for before in held if before is not None)
        return held


@contextlib.contextmanager
def groups(root: Path) -> Iterator[list[str]]:
    """Make the groups; they hold all CPUs and no task."""
    top = root / GROUP
    made = [top, *(top / f"c{number}" for number in range(CONTAINERS))]
    try:
        for directory in made:
            directory.mkdir()
            for name in ("cpuset.cpus", "cpuset.mems"):
                (directory / name).write_text((root / name).read_text())
        yield [f"{GROUP}/c{number}" for number in range(CONTAINERS)]
    finally:
        for directory in reversed(made):
            with contextlib.suppress(FileNotFoundError):
                directory.rmdir()


def states(online: CpuSet, paths: list[str]) -> tuple[NodeState, NodeState]:
    """Return the node with all containers on all CPUs, and with one CPU owned by a container without a
    group."""
    machine = regular_machine(1, 1, max(online) + 1, 1)
    node = Node(machine, CpuTopology.of(machine))
    pod = Pod("s", "u", "bench", "p", kube_qos=KubeQos.BURSTABLE)
    there = [
        Container(
            path,
            path,
            pod,
            Request(),
            Placement(Pool.SHARED, CpuSet(), Mask()),
            Phase.RUNNING,
            0,
            cgroup=path,
        )
        for path in paths
    ]
    own = Placement(Pool.OWN, CpuSet([max(online)]), Mask(), excludes_be=True)
    owner = Container("owner", "o", pod, Request(), own, Phase.CREATING, 0, "u/o")
    return NodeState.of(node, [pod], there), NodeState.of(node, [pod], [*there, owner])


def bare(root: Path, paths: list[str]) -> Callable[[str], None]:
    files = [f"{root}/{path}/cpuset.cpus" for path in paths]

    def loop(text: str) -> None:
        data = text.encode()
        for file in files:
            fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
            os.write(fd, data)
            os.close(fd)

    return loop


def reading(root: Path, paths: list[str]) -> Callable[[str], None]:
    files = [f"{root}/{path}/cpuset.cpus" for path in paths]

    def loop(text: str) -> None:
        data = text.encode()
        for file in files:
            fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
            os.pwrite(fd, data, 0)
            os.pread(fd, 256, 0)
            os.close(fd)

    return loop


@dataclass(frozen=True, slots=True)
class Moved:
    """The results.

    Attributes:
        bare, reading, writer: CPU time if all change, in milliseconds.
        clock: The time by the clock, as a multiple of the bare loop's.
        writes, unchanged: Writes if all change, and if nothing does.
    """

    bare: float
    reading: float
    writer: float
    clock: float
    writes: int
    unchanged: int

    @property
    def ratio(self) -> float:
        return self.writer / self.bare

    @property
    def missed(self) -> bool:
        return self.ratio > BAR or self.writes != CONTAINERS or self.unchanged != 0


def measure(root: Path) -> Moved:
    """Move all containers, again and again."""
    files, took, dice = CountingFiles(root), Figures(), random.Random(1)
    with groups(root) as paths:
        online = CpuSet.parse((root / "cpuset.cpus").read_text())
        there, owned = states(online, paths)
        now, fewer = [there], str(owned.pools.shared)
        cpuset_writer = CpusetWriter(KernelCgroups(root, 1, files), lambda: now[0])
        back, work = cpuset_writer.write_pools, dict[str, Callable[[], object]]()
        work["bare"] = partial(bare(root, paths), fewer)
        work["reading"] = partial(reading(root, paths), fewer)
        work["writer"] = cpuset_writer.write_pools
        writes, unchanged = set[int](), set[int]()
        for _ in range(ROUNDS):
            for name in dice.sample(list(work), len(work)):
                now[0] = there
                back()
                now[0], before = owned, files.writes
                clock, cpu = time.perf_counter(), time.thread_time()
                work[name]()
                took.add("CPU", name, (time.thread_time() - cpu) * 1000)
                took.add("clock", name, (time.perf_counter() - clock) * 1000)
                if name == "writer":
                    writes.add(files.writes - before)
                    before = files.writes
                    cpuset_writer.write_pools()
                    unchanged.add(files.writes - before)
    cpu_ms = [took.median("CPU", name) or 0.0 for name in work]
    clock_ms = [took.median("clock", name) or 0.0 for name in work]
    least, reads, writer = cpu_ms
    return Moved(least, reads, writer, clock_ms[-1] / clock_ms[0], max(writes), max(unchanged))


def main() -> int:
    try:
        kernel = open_cgroups(Path("/sys/fs/cgroup"))
    except CgroupError as error:
        print(f"300 containers leave a CPU: not measured, {error}")
        return 0
    if kernel.version != 1 or os.geteuid() != 0:
        print("300 containers leave a CPU: not measured, this needs cgroup v1 and root")
        return 0
    moved = measure(kernel.root)
    row = [
        "all change; nothing changes",
        *(number(ms, "ms") for ms in (moved.bare, moved.reading, moved.writer)),
    ]
    row += [number(moved.ratio), f"{BAR}" + (" MISSED" if moved.missed else ""), number(moved.clock)]
    print(render(HEAD, [[*row, str(moved.writes), str(moved.unchanged)]]))
    return int(moved.missed)


if __name__ == "__main__":
    sys.exit(main())
