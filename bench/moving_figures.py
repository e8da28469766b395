"""Three hundred containers leave a CPU, on real cgroups, beside a bare loop: a command by itself, as root

    .venv/bin/python bench/moving_figures.py

The bare loop opens each group's ``cpuset.cpus``, writes it and closes it: the least that anybody can do who
knows the paths. What is compared with it does what a create waits for: the wanted set of every container,
the group's value read before and after. In each round both are done once, in turn; of each the best round
counts, as others run here too. Then nothing is to change, and nothing is written. On cgroup v1; a group is
made for it and removed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from table import number, render

from proxy.apply.files import OsFiles
from proxy.apply.kernel import KernelCgroups, open_cgroups
from proxy.keeper.enforce import Enforcer
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, KubeQos, Phase, Placement, Pod, Pool, Request
from proxy.place.cputopo import CpuTopology
from proxy.plan.node import Node
from proxy.plan.state import NodeState
from proxy.topology.build import described

HEAD = (
    "300 containers leave a CPU (cgroup v1)",
    "bare loop",
    "topoproxy",
    "ratio",
    "bar",
    "writes",
    "unchanged",
)
CONTAINERS, ROUNDS, BAR = 300, 40, 1.15
GROUP = "topoproxy-bench"


class Counting(OsFiles):
    """Counts what is written."""

    writes = 0

    def write(self, path: str, name: str, text: str) -> None:
        self.writes += 1
        super().write(path, name, text)

    def exchange(self, path: str, name: str, text: str) -> tuple[str, str | None]:
        before, after = super().exchange(path, name, text)
        self.writes += after is not None
        return before, after


@contextlib.contextmanager
def groups(root: Path) -> Iterator[list[str]]:
    """Make the groups; they hold all CPUs and no task."""
    top = root / GROUP
    made = [top, *(top / f"c{number}" for number in range(CONTAINERS))]
    try:
        for folder in made:
            folder.mkdir()
            for name in ("cpuset.cpus", "cpuset.mems"):
                (folder / name).write_text((root / name).read_text())
        yield [f"{GROUP}/c{number}" for number in range(CONTAINERS)]
    finally:
        for folder in reversed(made):
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()


def states(online: CpuSet, paths: list[str]) -> tuple[NodeState, NodeState]:
    """Give the node with everybody on all CPUs, and with one CPU owned by somebody without a group."""
    machine = described(1, 1, max(online) + 1, 1)
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
    own = Placement(Pool.OWN, CpuSet([max(online)]), Mask(), hard=True)
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


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1000


def measure(root: Path) -> tuple[float, float, int, int]:
    """Give milliseconds of the bare loop and of ours, and writes where all changes and where nothing does."""
    files = Counting(root)
    with groups(root) as paths:
        online = CpuSet.parse((root / "cpuset.cpus").read_text())
        states_ = states(online, paths)
        now = [states_[0]]
        enforcer, loop = Enforcer(KernelCgroups(root, 1, files), lambda: now[0]), bare(root, paths)
        texts = [str(state.pools.shared) for state in states_]
        least, ours, writes = [], [], []
        for _ in range(ROUNDS):
            least.append(timed(lambda: loop(texts[1])))
            loop(texts[0])
            now[0], before = states_[1], files.writes
            ours.append(timed(enforcer.enforce_pools))
            writes.append(files.writes - before)
            now[0], before = states_[1], files.writes
            enforcer.enforce_pools()
            unchanged = files.writes - before
            loop(texts[0])
    return min(least), min(ours), max(writes), unchanged


def main() -> int:
    try:
        kernel = open_cgroups(Path("/sys/fs/cgroup"))
    except CgroupError as error:
        print(f"300 containers leave a CPU: not measured, {error}")
        return 0
    if kernel.version != 1 or os.geteuid() != 0:
        print("300 containers leave a CPU: not measured, this needs cgroup v1 and root")
        return 0
    least, ours, writes, unchanged = measure(kernel.root)
    missed = ours > BAR * least or writes != CONTAINERS or unchanged != 0
    row = ["all change; nothing changes", number(least, "ms"), number(ours, "ms"), number(ours / least)]
    row += [f"{BAR}" + (" MISSED" if missed else ""), str(writes), str(unchanged)]
    print(render(HEAD, [row]))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
