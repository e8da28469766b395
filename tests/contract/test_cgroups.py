"""One set of cases for the imitated cpuset tree and for the kernel's: both must pass the same tests."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, IdSet, Mask

MOUNT = Path("/sys/fs/cgroup/cpuset")


class Bed:
    """A tree to test on: a group of its own, CPUs that may be used, and tasks to put in."""

    def __init__(self, groups: KernelCgroups, base: str, cpus: CpuSet, mems: Mask) -> None:
        self.groups, self.base, self.cpus, self.mems = groups, base, cpus, mems
        self.few = CpuSet([cpus.first()])
        self.rest = cpus - self.few
        self.tasks: list[subprocess.Popen[bytes]] = []

    def path(self, name: str) -> str:
        return f"{self.base}/{name}" if name else self.base

    def mkdir(self, name: str) -> str:
        path = self.path(name)
        if isinstance(self.groups, FakeCgroups):
            self.groups.mkdir(path)
        else:
            (self.groups.root / path).mkdir()
        return path

    def rmdir(self, name: str) -> None:
        if isinstance(self.groups, FakeCgroups):
            self.groups.rmdir(self.path(name))
        else:
            (self.groups.root / self.path(name)).rmdir()

    def put(self, name: str, file: str, text: str) -> None:
        """Write as any program would: without our code, but under the kernel's rules."""
        if isinstance(self.groups, FakeCgroups):
            self.groups._tree.write(self.path(name), file, text)
            return
        fd = os.open(self.groups.root / self.path(name) / file, os.O_WRONLY)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def raw(self, name: str, file: str) -> str:
        return (self.groups.root / self.path(name) / file).read_text()

    def fill(self, name: str, cpus: CpuSet | None = None) -> str:
        """Make a group that holds CPUs and nodes."""
        path = self.mkdir(name)
        self.put(name, "cpuset.cpus", str(self.cpus if cpus is None else cpus))
        self.put(name, "cpuset.mems", str(self.mems))
        return path

    def task(self) -> int:
        task = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        self.tasks.append(task)
        return task.pid

    def end_tasks(self) -> None:
        for task in self.tasks:
            task.send_signal(signal.SIGKILL)
            task.wait()
            if isinstance(self.groups, FakeCgroups):
                self.groups.detach(task.pid)
        self.tasks.clear()

    def clean(self) -> None:
        self.end_tasks()
        top = self.groups.root / self.base
        for path in sorted((p for p in top.rglob("*") if p.is_dir()), reverse=True):
            self.rmdir(str(path.relative_to(top)))
        if top.is_dir():
            self.rmdir("")


def directory_bed(tmp_path: Path, version: int) -> Bed:
    groups = FakeCgroups(
        tmp_path / "tree", CpuSet.parse("0-7"), Mask.parse("0-1"), version, CpuSet.parse("0-9")
    )
    groups.mkdir("own")
    return Bed(groups, "own", CpuSet.parse("0-7"), Mask.parse("0-1"))


def real_bed() -> Bed:
    if os.geteuid() != 0 or not (MOUNT / "cpuset.cpus").is_file():
        pytest.skip("needs root and a cgroup v1 cpuset mount")
    groups = KernelCgroups(MOUNT, 1)
    have = groups.read("")
    if len(have.cpus) < 2:
        pytest.skip("needs two CPUs")
    base = f"topoproxy-test-{os.getpid()}"
    try:
        (MOUNT / base).mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a cpuset group here: {error}")
    return Bed(groups, base, have.cpus, have.mems)


def refused(number: int, call: Callable[[], object]) -> None:
    with pytest.raises(OSError) as caught:
        call()
    assert caught.value.errno == number, errno.errorcode[caught.value.errno or 0]


def cgroup_error(number: int, call: Callable[[], object]) -> str:
    with pytest.raises(CgroupError) as caught:
        call()
    assert caught.value.errno == number, str(caught.value)
    assert str(caught.value).startswith("cannot ")
    return str(caught.value)


@pytest.fixture
def bed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bed]:
    made = real_bed() if request.param == "kernel-v1" else directory_bed(tmp_path, int(request.param[-1]))
    made.put("", "cpuset.cpus", str(made.cpus))
    made.put("", "cpuset.mems", str(made.mems))
    yield made
    made.clean()


both_v1 = pytest.mark.parametrize("bed", ["directory-v1", "kernel-v1"], indirect=True)
every = pytest.mark.parametrize("bed", ["directory-v1", "directory-v2", "kernel-v1"], indirect=True)
v2 = pytest.mark.parametrize("bed", ["directory-v2"], indirect=True)


@both_v1
class TestRulesOfV1:
    """Rules of the kernel itself; the only code of ours is the imitated directory."""

    def test_a_new_group_is_empty(self, bed: Bed) -> None:
        bed.mkdir("new")
        for file in ("cpuset.cpus", "cpuset.mems", "cpuset.effective_cpus", "cpuset.effective_mems"):
            assert bed.raw("new", file) == "\n"
        assert bed.raw("new", "cgroup.procs") == ""

    def test_a_child_must_lie_within_its_parent(self, bed: Bed) -> None:
        bed.mkdir("a")
        bed.mkdir("a/b")
        refused(errno.EACCES, lambda: bed.put("a/b", "cpuset.cpus", str(bed.few)))
        bed.put("a", "cpuset.cpus", str(bed.few))
        refused(errno.EACCES, lambda: bed.put("a/b", "cpuset.cpus", str(bed.rest)))
        bed.put("a/b", "cpuset.cpus", str(bed.few))
        assert bed.raw("a/b", "cpuset.cpus") == f"{bed.few}\n"

    def test_a_parent_cannot_shrink_below_its_child(self, bed: Bed) -> None:
        bed.fill("a")
        bed.fill("a/b")
        refused(errno.EBUSY, lambda: bed.put("a", "cpuset.cpus", str(bed.few)))
        refused(errno.EBUSY, lambda: bed.put("a", "cpuset.mems", "\n"))
        bed.put("a/b", "cpuset.cpus", str(bed.few))
        bed.put("a", "cpuset.cpus", str(bed.few))

    @pytest.mark.parametrize(
        ("file", "text", "number"),
        [
            ("cpuset.cpus", "60000", errno.ERANGE),
            ("cpuset.mems", "3000", errno.ERANGE),
            ("cpuset.mems", "900", errno.EINVAL),
            ("cpuset.cpus", "x", errno.EINVAL),
            ("cpuset.cpus", "3-1", errno.EINVAL),
            ("cpuset.cpus", "0;1", errno.EINVAL),
            ("cpuset.effective_cpus", "0", errno.EINVAL),
            ("cpuset.nothing", "0", errno.ENOENT),
        ],
    )
    def test_a_bad_value_is_refused_with_the_kernels_errno(
        self, bed: Bed, file: str, text: str, number: int
    ) -> None:
        bed.fill("a")
        if text == "900" and not isinstance(bed.groups, FakeCgroups):
            possible = Path("/sys/devices/system/node/possible").read_text().strip()
            text = str(max(Mask.parse(possible)) + 1)
        refused(number, lambda: bed.put("a", file, text))

    def test_tasks_need_cpus_and_nodes(self, bed: Bed) -> None:
        bed.mkdir("a")
        pid = str(bed.task())
        refused(errno.ENOSPC, lambda: bed.put("a", "cgroup.procs", pid))
        bed.put("a", "cpuset.cpus", str(bed.cpus))
        refused(errno.ENOSPC, lambda: bed.put("a", "cgroup.procs", pid))
        bed.put("a", "cpuset.mems", str(bed.mems))
        bed.put("a", "cgroup.procs", pid)
        assert bed.raw("a", "cgroup.procs") == f"{pid}\n"
        refused(errno.ENOSPC, lambda: bed.put("a", "cpuset.cpus", "\n"))
        refused(errno.ENOSPC, lambda: bed.put("a", "cpuset.mems", "\n"))
        bed.put("a", "cpuset.cpus", "")  # an empty write does nothing
        assert bed.raw("a", "cpuset.cpus") == f"{bed.cpus}\n"
        bed.end_tasks()
        bed.put("a", "cpuset.cpus", "\n")
        assert bed.raw("a", "cpuset.cpus") == "\n"

    def test_a_group_in_use_stays(self, bed: Bed) -> None:
        bed.fill("a")
        bed.fill("a/b")
        refused(errno.EBUSY, lambda: bed.rmdir("a"))
        bed.put("a/b", "cgroup.procs", str(bed.task()))
        refused(errno.EBUSY, lambda: bed.rmdir("a/b"))
        refused(errno.ENOENT, lambda: bed.mkdir("x/y"))
        refused(errno.EEXIST, lambda: bed.mkdir("a"))

    def test_the_root_is_fixed(self, bed: Bed) -> None:
        base, bed.base = bed.base, ""
        try:
            refused(errno.EACCES, lambda: bed.put("", "cpuset.cpus", str(bed.few)))
        finally:
            bed.base = base


@every
class TestWrite:
    def test_write_and_read(self, bed: Bed) -> None:
        path = bed.mkdir("c")
        assert bed.groups.write(path, bed.few, bed.mems) is True
        value = bed.groups.read(path)
        assert (value.cpus, value.effective_cpus) == (bed.few, bed.few)
        assert (value.mems, value.effective_mems) == (bed.mems, bed.mems)
        assert bed.groups.write(path, bed.few, bed.mems) is False
        assert bed.groups.write(path, bed.rest, None) is True
        assert bed.groups.read(path).effective_cpus == bed.rest

    def test_an_equal_list_in_another_notation_is_not_written(self, bed: Bed) -> None:
        path = bed.fill("c")
        assert bed.groups.write(path, CpuSet(reversed(list(bed.cpus))), bed.mems) is False

    def test_another_writer_is_noticed(self, bed: Bed) -> None:
        path = bed.mkdir("c")
        bed.groups.write(path, bed.few, bed.mems)
        bed.put("c", "cpuset.cpus", str(bed.rest))
        assert bed.groups.write(path, bed.few, None) is True
        assert bed.groups.read(path).cpus == bed.few

    def test_narrow_parents_are_widened_and_no_others(self, bed: Bed) -> None:
        bed.put("", "cpuset.cpus", str(bed.few))
        bed.fill("pod", bed.few)
        bed.fill("other", bed.few)
        path = bed.fill("pod/c", bed.few)
        bed.fill("pod/sidecar", bed.few)
        assert bed.groups.write(path, bed.rest, None) is True
        read = bed.groups.read
        assert (read(path).cpus, read(path).effective_cpus) == (bed.rest, bed.rest)
        assert read(bed.path("pod")).cpus == bed.cpus
        assert read(bed.base).cpus == bed.cpus
        assert read(bed.path("other")).cpus == bed.few
        assert read(bed.path("pod/sidecar")).cpus == bed.few

    def test_empty_sets_are_never_written(self, bed: Bed) -> None:
        path = bed.mkdir("c")
        before = bed.raw("c", "cpuset.cpus")
        cgroup_error(errno.EINVAL, lambda: bed.groups.write(path, CpuSet(), None))
        cgroup_error(errno.EINVAL, lambda: bed.groups.write(path, bed.few, Mask()))
        assert bed.raw("c", "cpuset.cpus") == before

    def test_offline_ids_are_left_out_while_others_are_online(self, bed: Bed) -> None:
        path = bed.fill("c", bed.few)
        offline = CpuSet([max(bed.groups.read("").effective_cpus) + 1])
        if not isinstance(bed.groups, FakeCgroups):
            possible = CpuSet.parse(Path("/sys/devices/system/cpu/possible").read_text())
            if not offline <= possible:
                pytest.skip("this machine has no CPU that is offline")
        assert bed.groups.write(path, bed.rest | offline, None) is True
        assert bed.groups.read(path).effective_cpus == bed.rest
        assert bed.groups.write(path, bed.rest | offline, None) is False
        before = bed.raw("c", "cpuset.cpus")
        with pytest.raises(CgroupError, match="cannot set CPUs"):
            bed.groups.write(path, offline, None)
        if bed.groups.version == 1:
            assert bed.raw("c", "cpuset.cpus") == before

    def test_offline_ids_do_not_prevent_widening_of_parents(self, bed: Bed) -> None:
        bed.fill("pod", bed.few)
        path = bed.fill("pod/c", bed.few)
        offline = CpuSet([max(bed.groups.read("").effective_cpus) + 1])
        if not isinstance(bed.groups, FakeCgroups):
            pytest.skip("needs a CPU that is offline")
        assert bed.groups.write(path, bed.rest | offline, None) is True
        assert bed.groups.read(path).effective_cpus == bed.rest

    def test_a_write_to_a_removed_group_fails(self, bed: Bed) -> None:
        for call in (
            lambda: bed.groups.read(bed.path("missing")),
            lambda: bed.groups.write(bed.path("missing"), bed.few, None),
        ):
            assert "gone" in cgroup_error(errno.ENOENT, call)

    def test_a_cpu_id_out_of_range_is_refused(self, bed: Bed) -> None:
        path = bed.mkdir("c")
        message = cgroup_error(errno.ERANGE, lambda: bed.groups.write(path, CpuSet([60000]), None))
        assert "60000" in message

    def test_the_root_is_not_written(self, bed: Bed) -> None:
        cgroup_error(errno.EACCES, lambda: bed.groups.write("", bed.few, None))
        cgroup_error(errno.EACCES, lambda: bed.groups.write("/", bed.few, None))

    def test_a_task_follows_its_group(self, bed: Bed) -> None:
        path = bed.fill("c")
        pid = bed.task()
        bed.put("c", "cgroup.procs", str(pid))
        bed.groups.write(path, bed.few, None)
        if not isinstance(bed.groups, FakeCgroups):
            assert os.sched_getaffinity(pid) == set(bed.few)
        assert bed.groups.read(path).effective_cpus == bed.few

    def test_a_group_is_found_by_parent_and_id(self, bed: Bed) -> None:
        bed.mkdir("podx")
        path = bed.mkdir("podx/0123456789abcdef")
        assert bed.groups.find(f"/{bed.base}/podx", "0123456789abcdef") == path
        assert bed.groups.find(f"/{bed.base}/podx", "fedcba9876543210") is None


@v2
class TestRulesOfV2:
    """As seen in a virtual machine with cgroup v2; here on the directory."""

    def test_a_new_group_inherits(self, bed: Bed) -> None:
        value = bed.groups.read(bed.mkdir("c"))
        assert not value.cpus
        assert (value.effective_cpus, value.effective_mems) == (bed.cpus, bed.mems)

    def test_a_set_outside_the_parent_is_accepted_without_effect(self, bed: Bed) -> None:
        bed.fill("a", bed.few)
        bed.fill("a/b", bed.rest)
        value = bed.groups.read(bed.path("a/b"))
        assert (value.cpus, value.effective_cpus) == (bed.rest, bed.few)
        bed.put("a", "cpuset.cpus", str(bed.cpus))
        assert bed.groups.read(bed.path("a/b")).effective_cpus == bed.rest

    def test_a_value_without_effect_does_not_count_as_success(self, bed: Bed) -> None:
        """The file holds the value already, but the parent limits it: the parent must change."""
        bed.fill("a", bed.few)
        path = bed.fill("a/b", bed.rest)
        assert bed.groups.write(path, bed.rest, None) is True
        assert bed.groups.read(path).effective_cpus == bed.rest

    def test_parents_that_inherit_are_left_alone(self, bed: Bed) -> None:
        bed.mkdir("a")
        path = bed.mkdir("a/b")
        bed.put("", "cpuset.cpus", str(bed.few))
        assert bed.groups.write(path, bed.rest, None) is True
        assert bed.groups.read(path).effective_cpus == bed.rest
        assert bed.groups.read(bed.base).cpus == bed.cpus
        assert not bed.groups.read(bed.path("a")).cpus

    def test_offline_cpus_are_not_an_error_while_one_is_online(self, bed: Bed) -> None:
        path = bed.mkdir("c")
        assert bed.groups.write(path, CpuSet.parse("7-8"), None) is True
        assert bed.groups.read(path).effective_cpus == CpuSet.parse("7")
        cgroup_error(0, lambda: bed.groups.write(path, CpuSet.parse("8-9"), None))

    def test_a_group_with_tasks_below_it_cannot_be_emptied(self, bed: Bed) -> None:
        bed.fill("a")
        bed.mkdir("a/b")
        bed.put("a/b", "cgroup.procs", str(bed.task()))
        refused(errno.ENOSPC, lambda: bed.put("a", "cpuset.cpus", "\n"))
        refused(errno.EINVAL, lambda: bed.put("a", "cpuset.mems", "5"))

    def test_effective_cpus_cascade_to_children(self, bed: Bed) -> None:
        bed.mkdir("a")
        bed.mkdir("a/b")
        bed.put("a", "cpuset.cpus", str(bed.few))
        assert bed.groups.read(bed.path("a/b")).effective_cpus == bed.few


@every
class TestGroupsInAContainer:
    """A runtime or an init system in a container creates its own groups."""

    def make_nested(self, bed: Bed, depth: int) -> list[str]:
        names = ["c" + "/d" * i for i in range(depth)]
        for name in names:
            bed.fill(name)
        return names

    def effective_sets(self, bed: Bed, names: list[str]) -> set[CpuSet]:
        return {bed.groups.read(bed.path(name)).effective_cpus for name in names}

    @pytest.mark.parametrize("depth", [2, 4])
    def test_inner_groups_shrink_before_the_container_and_grow_after_it(self, bed: Bed, depth: int) -> None:
        names = self.make_nested(bed, depth)
        bed.put(names[-1], "cgroup.procs", str(bed.task()))
        for cpus in (bed.few, bed.cpus, bed.rest, bed.few, bed.cpus):
            assert bed.groups.write(bed.path("c"), cpus, None) is True
            assert self.effective_sets(bed, names) == {cpus}
            assert bed.groups.write(bed.path("c"), cpus, None) is False
        if bed.groups.version == 2:
            assert bed.groups.read(bed.path("c/d")).cpus == bed.cpus, "v2 needs no write of the daemon"

    def test_inner_groups_with_fewer_cpus_keep_those_that_remain(self, bed: Bed) -> None:
        bed.fill("c")
        bed.fill("c/d", bed.rest)
        bed.fill("c/e", bed.few)
        bed.groups.write(bed.path("c"), bed.rest, None)
        assert self.effective_sets(bed, ["c", "c/d", "c/e"]) == {bed.rest}, (
            "a group without remaining CPUs gets the whole new set"
        )
        bed.groups.write(bed.path("c"), bed.cpus, None)
        kept = bed.groups.read(bed.path("c/d")).effective_cpus
        assert kept == (bed.rest if bed.groups.version == 2 else bed.cpus), (
            "on v1 the group had the whole set"
        )

    def test_inner_groups_are_not_changed_unless_requested(self, bed: Bed) -> None:
        self.make_nested(bed, 2)
        if bed.groups.version == 1:
            refusal = cgroup_error(
                errno.EBUSY, lambda: bed.groups.write(bed.path("c"), bed.few, None, adjust_below=False)
            )
            assert "a group below" in refusal
            bed.groups.write(bed.path("c"), bed.few, None)
        bed.groups.write(bed.path("c"), bed.cpus, None, adjust_below=False)
        values = bed.groups.read(bed.path("c/d"))
        assert values.cpus == (bed.few if bed.groups.version == 1 else bed.cpus)

    def test_a_parent_that_another_program_narrowed_is_not_an_obstacle(self, bed: Bed) -> None:
        bed.fill("pod", bed.few)
        bed.fill("pod/c", bed.few)
        bed.fill("pod/c/d", bed.few)
        assert bed.groups.write(bed.path("pod/c"), bed.rest, None) is True
        assert self.effective_sets(bed, ["pod/c", "pod/c/d"]) == {bed.rest}
        assert bed.groups.read(bed.path("pod")).cpus == bed.cpus, "widened, not narrowed"

    def test_the_depth_of_inner_groups_is_bounded(self, bed: Bed) -> None:
        names = self.make_nested(bed, 12)
        if bed.groups.version == 1:
            cgroup_error(errno.EBUSY, lambda: bed.groups.write(bed.path("c"), bed.few, None))
            assert self.effective_sets(bed, names) == {bed.cpus}, (
                "no write was begun that could not be completed"
            )
        else:
            bed.groups.write(bed.path("c"), bed.few, None)
            assert self.effective_sets(bed, names) == {bed.few}

    def test_a_group_created_during_the_write_is_narrowed_too(
        self, bed: Bed, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.make_nested(bed, 2)
        if bed.groups.version == 2:
            pytest.skip("v2 has nothing to do below")
        write, late = bed.groups._write_list, iter(["c/new"])

        def slowly(path: str, kind: object, value: IdSet) -> None:
            write(path, kind, value)  # type: ignore[arg-type]
            if path == bed.path("c/d") and (name := next(late, "")):
                bed.fill(name)

        monkeypatch.setattr(bed.groups, "_write_list", slowly)
        assert bed.groups.write(bed.path("c"), bed.few, None) is True
        assert self.effective_sets(bed, ["c", "c/d", "c/new"]) == {bed.few}
        assert not list(late)
