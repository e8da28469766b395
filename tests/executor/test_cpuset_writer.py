from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.allocation.cpu_topology import CpuTopology
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.engine.inflight import InflightCall
from proxy.engine.node import Node
from proxy.engine.state import NodeState
from proxy.executor.cpuset_writer import CpusetWriter
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask
from proxy.model.workload import Container, Phase, Placement, Pod, Pool, Request
from proxy.topology.regular_machine import regular_machine
from tests.testkit.changed_copy import changed_copy

MACHINE = regular_machine(1, 1, 4, 1)
POD = Pod("s", "u", "ns", "p", cgroup_parent="/kubepods")


class Cgroups:
    """Cgroups that record which containers are searched for."""

    def __init__(self, **sets: str) -> None:
        self.sets = {key: CpuSet.parse(text) for key, text in sets.items()}
        self.looked: list[str] = []
        self.error: int | None = None

    def find(self, parent: str, container_id: str) -> str | None:
        assert parent == "/kubepods"
        self.looked.append(container_id)
        return container_id if container_id in self.sets else None

    def write(self, path: str, cpus: CpuSet, mems: Mask | None) -> bool:
        assert mems is None
        if self.error is not None:
            raise CgroupError(f"cannot write {path}", self.error)
        changed, self.sets[path] = self.sets[path] != cpus, cpus
        return changed


def one(key: str, own: str = "", phase: Phase = Phase.RUNNING, cgroup: str = "") -> Container:
    pool = Pool.OWN if own else Pool.SHARED
    placement = Placement(pool, CpuSet.parse(own), Mask((0,)))
    return Container(key, key, POD, Request(), placement, phase, 0, key if own else "", cgroup)


def cpuset_writer(cgroups: Cgroups, *containers: Container) -> CpusetWriter:
    state = NodeState.of(Node(MACHINE, CpuTopology.of(MACHINE)), (), containers)
    return CpusetWriter(cgroups, lambda: state)


def with_call(state: NodeState, key: str) -> NodeState:
    """Return a state with a call in flight for a container."""
    return changed_copy(state, inflight=state.inflight.added(InflightCall(1, key, CpuSet())))


def test_a_missing_cgroup_is_searched_twice_then_rarely() -> None:
    cgroups = Cgroups()
    ours = cpuset_writer(cgroups, one("vm"))
    for _ in range(64):
        ours.write_all()
    assert len(cgroups.looked) == 2 + 2, "searched again in the passes 32 and 64"
    ours.write_pools()
    assert len(cgroups.looked) == 4, "never searched during a create"
    assert ours.write(["vm"]).absent == ["vm"], "always looked up by name"


def test_a_cgroup_that_a_start_makes_is_searched_for_again_once_the_container_runs() -> None:
    cgroups, phase = Cgroups(), Phase.STARTING
    node = Node(MACHINE, CpuTopology.of(MACHINE))
    owner = one("owner", "0", Phase.CREATED)
    ours = CpusetWriter(cgroups, lambda: NodeState.of(node, (), [owner, one("ls", phase=phase)]))
    for _ in range(4):
        ours.write_pools()
    assert cgroups.looked == ["ls"] * 2
    phase, cgroups.sets["ls"] = Phase.RUNNING, CpuSet.parse("0-3")
    assert ours.write_pools().written == ["ls"], "the owner's create must not leave it there"
    assert cgroups.sets["ls"] == CpuSet.parse("1-3")


@pytest.mark.parametrize("count", [1, 9])
def test_a_fence_that_an_earlier_run_has_left_keeps_no_container_from_more_cpus(
    tmp_path: Path, count: int
) -> None:
    """The fence stays while it has all planned CPUs; the next write widens it, also at a start."""
    cgroups = FakeCgroups(tmp_path, MACHINE.online, Mask((0,)), 2)
    pod = Pod("s", "u", "ns", "p", cgroup_parent="/kubepods/podu")
    keys = [f"c{number}" for number in range(count)]
    for path in ("kubepods", "kubepods/podu", *(f"kubepods/podu/{key}" for key in keys)):
        cgroups.mkdir(path)
    cgroups.write("kubepods/podu", CpuSet.parse("1-3"), None)
    there = [changed_copy(one(key, cgroup=f"kubepods/podu/{key}"), pod=pod) for key in keys]
    node = Node(MACHINE, CpuTopology.of(MACHINE))
    now = [NodeState.of(node, [pod], [*there, one("own", "0")])]
    ours = CpusetWriter(cgroups, lambda: now[0])

    def enforced() -> set[str]:
        assert ours.write_all().errors == []
        return {
            str(cgroups.read(path).effective_cpus) for path in ("kubepods/podu", f"kubepods/podu/{keys[-1]}")
        }

    assert enforced() == {"1-3"}
    now[0] = NodeState.of(node, [pod], there)
    assert enforced() == {"0-3"}
    cgroups.write("kubepods/podu", CpuSet.parse("1-3"), None)  # found so by another run, which moves nothing
    assert CpusetWriter(cgroups, lambda: now[0]).write_all().errors == []
    assert str(cgroups.read("kubepods/podu").effective_cpus) == "0-3"
    cgroups.write("kubepods/podu", CpuSet.parse("1-3"), None)
    ours.make_room(changed_copy(one("late", phase=Phase.CREATED), pod=pod))
    assert str(cgroups.read("kubepods/podu").effective_cpus) == "0-3"


def test_a_cgroup_that_appears_later_counts_as_found() -> None:
    cgroups = Cgroups()
    ours = cpuset_writer(cgroups, one("a"))
    assert ours.write_all().absent == ["a"]
    cgroups.sets["a"] = CpuSet()
    assert ours.write_all().written == ["a"]
    del cgroups.sets["a"]
    cgroups.error = errno.ENOENT
    for _ in range(2):
        assert ours.write_all().absent == ["a"]
    assert ours.write_all().absent == []


def test_pools_are_enforced_without_the_owners_that_are_known_to_be_on_their_cpus() -> None:
    cgroups = Cgroups(own="0-3", ls="0-3", dead="0-3", known="0-3")
    ours = cpuset_writer(
        cgroups, one("own", "0"), one("ls"), one("dead", phase=Phase.EXITED), one("x", cgroup="known")
    )
    assert sorted(ours.write_pools().written) == ["ls", "own", "x"], "the owner may be on any CPU"
    assert {k: str(v) for k, v in cgroups.sets.items()} == {
        "own": "0",
        "ls": "1-3",
        "dead": "0-3",
        "known": "1-3",
    }
    assert sorted(cgroups.looked) == ["ls", "own"]
    cgroups.sets["own"] = CpuSet.parse("0-3")
    assert ours.write_pools().written == []
    assert ours.write_all().written == ["own"]
    assert ours.write(["ls", "own", "missing"]).written == []


@pytest.mark.parametrize("phase", [Phase.CREATED, Phase.STARTING])
def test_the_cgroup_of_an_owner_that_does_not_run_yet_is_not_searched_with_the_pools(phase: Phase) -> None:
    cgroups = Cgroups(own="0-3")
    assert cpuset_writer(cgroups, one("own", "0", phase=phase)).write_pools().written == []
    assert cgroups.looked == []


def test_a_failed_write_is_reported() -> None:
    cgroups = Cgroups(ls="0-3", gone="0-3")
    ours = cpuset_writer(cgroups, one("ls"))
    cgroups.error = errno.EBUSY
    done = ours.write_all()
    assert (done.written, done.absent, done.errors) == ([], [], ["cannot write ls"])
    for number in (errno.ENOENT, errno.ENODEV):
        cgroups.error = number
        done = ours.write(["ls"])
        assert (done.absent, done.errors) == (["ls"], [])
    assert cgroups.looked == ["ls"] * 4, "a lost group is searched for again at once"


def test_a_partly_refused_write_counts_once_it_is_complete() -> None:
    cgroups = Cgroups(ls="0-1")
    ours = cpuset_writer(cgroups, one("ls"))
    cgroups.error = errno.EBUSY  # of the pod's group
    assert ours.write_all().written == []
    cgroups.sets["ls"], cgroups.error = MACHINE.online, None  # its own group has been written
    done = ours.write_all()
    assert (done.written, done.drifted) == (["ls"], []), "the runtime is to receive the set"
    assert ours.write_all().written == []


def test_knowledge_of_a_container_ends_with_it() -> None:
    cgroups = Cgroups(a="0-3")
    node = Node(MACHINE, CpuTopology.of(MACHINE))
    there = NodeState.of(node, (), [one("a"), one("vm")])
    states = iter([there, there, NodeState.empty(node), there])
    ours = CpusetWriter(cgroups, lambda: now[0])
    for state in states:
        now = [state]
        ours.write_all()
    assert sorted(cgroups.looked) == ["a", "a", "vm", "vm", "vm"]


def test_containers_leave_owned_cpus_before_the_owner_is_written() -> None:
    """After a crash the ledger may assign an owner CPUs that other containers still use."""
    written: list[str] = []

    class Ordered(Cgroups):
        def write(self, path: str, cpus: CpuSet, mems: Mask | None, *, adjust_below: bool = True) -> bool:
            written.append(path)
            return super().write(path, cpus, mems)

    there = [one("own-a", "0"), one("ls-a"), one("own-b", "1"), one("ls-b"), one("ls-c")]
    cgroups = Ordered(**{container.id: "0-3" for container in there})
    cpuset_writer(cgroups, *there).write_all()
    assert (sorted(written[:3]), sorted(written[3:])) == (["ls-a", "ls-b", "ls-c"], ["own-a", "own-b"])
    written.clear()
    cpuset_writer(cgroups, *there).write([container.id for container in there])
    assert written == ["ls-a", "ls-b", "ls-c", "own-a", "own-b"]


def test_a_write_of_our_own_call_is_not_drift() -> None:
    cgroups = Cgroups(ls="0-3")
    idle = NodeState.of(Node(MACHINE, CpuTopology.of(MACHINE)), (), [one("ls"), one("own", "0")])
    states = [idle]
    ours = CpusetWriter(cgroups, lambda: states[-1])
    assert ours.write(["ls"]).drifted == []
    states.append(with_call(idle, "ls"))
    cgroups.sets["ls"] = CpuSet.parse("0-3")  # the runtime executes an earlier update
    assert ours.write(["ls"]).drifted == []
    cgroups.sets["ls"] = CpuSet.parse("0-3")  # and only now
    states.append(idle)
    done = ours.write(["ls"])
    assert (done.written, done.drifted) == (["ls"], [])
    cgroups.sets["ls"] = CpuSet.parse("0-3")
    assert ours.write(["ls"]).drifted == ["ls"], "a write by another process"


class BatchCgroups(Cgroups):
    """Cgroups that are written together, except for some."""

    unwritten: tuple[str, ...] = ()
    between: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, **sets: str) -> None:
        super().__init__(**sets)
        self.alone: list[str] = []
        self.together: list[tuple[str, ...]] = []

    def write(self, path: str, cpus: CpuSet, mems: Mask | None) -> bool:
        self.alone.append(path)
        return super().write(path, cpus, mems)

    def write_all(
        self, paths: list[str], cpus: CpuSet, known: CpuSet | None, should_continue: Callable[[], bool]
    ) -> list[bool | None]:
        self.together.append((str(cpus), str(known or ""), *paths))
        done: list[bool | None] = []
        for path in paths:
            if path in self.unwritten or not should_continue():
                done.append(None)
                continue
            assert known is None or self.sets[path] == known
            done.append(super().write(path, cpus, None))
            self.between()
        return done


NINE = [f"c{number}" for number in range(9)]


def test_many_containers_are_written_together_and_the_rest_one_by_one() -> None:
    cgroups = BatchCgroups(**dict.fromkeys(NINE, "0-3"), late="0-3")
    cgroups.unwritten = ("c3",)
    there = [one(key, cgroup=key) for key in NINE]
    ours = cpuset_writer(
        cgroups, *there, one("late"), one("own", "0"), one("dead", phase=Phase.EXITED, cgroup="c0")
    )
    assert sorted(ours.write_pools().written) == [*NINE, "late"]
    assert cgroups.alone == ["late", "c3"], "the group of one is unknown, and another one remains"
    assert {str(cpus) for cpus in cgroups.sets.values()} == {"1-3"}
    assert ours.write_pools().written == []
    assert [write[:2] for write in cgroups.together] == [("1-3", "")] * 2, "the parent group is read"
    cgroups.sets["c5"] = CpuSet.parse("0-3")
    done = ours.write_pools()
    assert (done.written, done.drifted) == (["c5"], ["c5"])


def test_a_container_with_another_recorded_set_is_written_at_once() -> None:
    cgroups = BatchCgroups(**dict.fromkeys(NINE, "0-3"))
    node = Node(MACHINE, CpuTopology.of(MACHINE))
    there = [one(key, cgroup=key) for key in NINE]
    alone, with_owner = NodeState.of(node, (), there), NodeState.of(node, (), [*there, one("own", "0")])
    now = [alone]
    ours = CpusetWriter(cgroups, lambda: now[0])
    assert ours.write_pools().written == []
    now[0] = with_owner
    assert sorted(ours.write_pools().written) == NINE
    assert [write[:2] for write in cgroups.together] == [("0-3", ""), ("1-3", "0-3")]
    ours.forget()
    now[0] = alone
    ours.write_pools()
    assert cgroups.together[-1][:2] == ("0-3", ""), "a group that may have another set is read"


def test_a_state_that_changes_during_the_writes_applies_to_the_rest() -> None:
    cgroups = BatchCgroups(**dict.fromkeys(NINE, "0-3"))
    node = Node(MACHINE, CpuTopology.of(MACHINE))
    there = [one(key, cgroup=key) for key in NINE]
    now = [NodeState.of(node, (), [*there, one("own", "0")])]
    ours = CpusetWriter(cgroups, lambda: now[0])

    def change() -> None:
        now[0] = NodeState.of(node, (), [*there, one("own", "0"), one("more", "1")])

    cgroups.between = change
    ours.write_pools()
    assert sorted(str(cpus) for cpus in cgroups.sets.values()) == ["1-3", *["2-3"] * 8]
    assert len(cgroups.alone) == 8


def test_a_write_of_our_own_call_is_not_drift_in_a_batch() -> None:
    cgroups = BatchCgroups(**dict.fromkeys(NINE, "0-3"))
    idle = NodeState.of(
        Node(MACHINE, CpuTopology.of(MACHINE)), (), [*(one(k, cgroup=k) for k in NINE), one("own", "0")]
    )
    states = [idle]
    ours = CpusetWriter(cgroups, lambda: states[-1])
    ours.write_pools()
    states.append(with_call(idle, "c0"))
    for key in ("c0", "c1"):
        cgroups.sets[key] = CpuSet.parse("0-3")
    done = ours.write_pools()
    assert (sorted(done.written), done.drifted) == (["c0", "c1"], ["c1"])
    states.append(idle)
    cgroups.sets["c0"] = CpuSet.parse("0-3")
    assert ours.write_pools().drifted == [], "its previous set is not known any more"
