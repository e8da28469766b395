"""One set of cases for imitated CFS quotas and for the kernel's: both must pass the same tests."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proxy.backends.cgroup.cfs_quota import KernelCpuGroups, open_cpu_groups
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask

MOUNT = Path("/sys/fs/cgroup")


class Bed:
    """A group of its own to test in."""

    def __init__(self, groups: KernelCpuGroups, base: str, tree: FakeCgroups | None) -> None:
        self.groups, self.base, self.tree = groups, base, tree
        self.mkdir("")

    def path(self, name: str) -> str:
        return f"{self.base}/{name}" if name else self.base

    def mkdir(self, name: str) -> str:
        path = self.path(name)
        if self.tree is not None:
            self.tree.mkdir(path)
        else:
            (self.groups.root / path).mkdir()
        return path

    def put(self, name: str, text: str, file: str = "") -> None:
        """Write as any program would: without our code, but under the kernel's rules."""
        file = file or ("cpu.cfs_quota_us" if self.groups.version == 1 else "cpu.max")
        self.groups._files.write(self.path(name), file, text)

    def clean(self) -> None:
        top = self.groups.root / self.base
        for path in [*sorted((p for p in top.rglob("*") if p.is_dir()), reverse=True), top]:
            if self.tree is not None:
                self.tree.rmdir(str(path.relative_to(self.groups.root)))
            else:
                path.rmdir()


@pytest.fixture
def bed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bed]:
    tree = None
    if request.param == "kernel-v1":
        try:
            groups = open_cpu_groups(MOUNT)
        except CgroupError as error:
            pytest.skip(str(error))
        if os.geteuid() != 0 or groups.version != 1:
            pytest.skip("needs root and a cgroup v1 mount of the cpu controller")
    else:
        tree = FakeCgroups(tmp_path / "tree", CpuSet.parse("0-7"), Mask.parse("0"), int(request.param[-1]))
        groups = open_cpu_groups(tmp_path / "tree")
    try:
        made = Bed(groups, f"topoproxy-cpu-test-{os.getpid()}", tree)
    except OSError as error:
        pytest.skip(f"cannot make a cpu group here: {error}")
    yield made
    made.clean()


both_v1 = pytest.mark.parametrize("bed", ["directory-v1", "kernel-v1"], indirect=True)
every = pytest.mark.parametrize("bed", ["directory-v1", "directory-v2", "kernel-v1"], indirect=True)


def invalid(call: Callable[[], object]) -> None:
    with pytest.raises(OSError) as caught:
        call()
    assert caught.value.errno == errno.EINVAL


def refused(number: int, call: Callable[[], object]) -> str:
    with pytest.raises(CgroupError) as caught:
        call()
    assert caught.value.errno == number, str(caught.value)
    assert str(caught.value).startswith("cannot ")
    return str(caught.value)


@both_v1
class TestRulesOfV1:
    """Rules of the kernel itself; the only code of ours is the imitated directory."""

    def test_a_new_group_has_no_quota(self, bed: Bed) -> None:
        assert bed.groups.quota(bed.mkdir("a")) == -1

    def test_a_group_may_not_have_more_than_the_nearest_above_that_has_one(self, bed: Bed) -> None:
        for name in ("a", "a/b", "a/b/c"):
            bed.mkdir(name)
        bed.put("a", "100000")
        bed.put("a/b/c", "100000")
        invalid(lambda: bed.put("a/b/c", "100001"))
        invalid(lambda: bed.put("a", "99999"))
        bed.put("a/b", "-1")
        bed.put("a/b/c", "-1")
        bed.put("a", "50000")
        assert bed.groups.quota(bed.path("a/b/c")) == -1

    def test_the_ratio_of_quota_and_period_is_compared(self, bed: Bed) -> None:
        bed.mkdir("a")
        bed.mkdir("a/b")
        bed.put("a", "100000")
        bed.put("a/b", "50000")
        invalid(lambda: bed.put("a/b", "40000", "cpu.cfs_period_us"))
        bed.put("a/b", "50000", "cpu.cfs_period_us")
        invalid(lambda: bed.put("a/b", "60000"))

    @pytest.mark.parametrize("text", ["0", "999", "x", "max", "100x", "999999999999999999"])
    def test_a_bad_quota_is_refused_and_changes_nothing(self, bed: Bed, text: str) -> None:
        bed.mkdir("a")
        invalid(lambda: bed.put("a", text))
        assert bed.groups.quota(bed.path("a")) == -1

    @pytest.mark.parametrize("text", ["999", "1000001", "-1"])
    def test_bad_periods_are_refused(self, bed: Bed, text: str) -> None:
        bed.mkdir("a")
        invalid(lambda: bed.put("a", text, "cpu.cfs_period_us"))

    def test_a_negative_quota_means_none_and_an_empty_write_changes_nothing(self, bed: Bed) -> None:
        bed.mkdir("a")
        bed.put("a", "20000")
        bed.put("a", "")
        assert bed.groups.quota(bed.path("a")) == 20000
        bed.put("a", "-5")
        assert bed.groups.quota(bed.path("a")) == -1

    def test_the_root_is_fixed(self, bed: Bed) -> None:
        invalid(lambda: bed.groups._files.write("", "cpu.cfs_quota_us", "10000"))


@every
class TestQuota:
    def test_a_quota_is_removed_and_restored(self, bed: Bed) -> None:
        pod, container = bed.mkdir("a"), bed.mkdir("a/b")
        for path, quota in ((pod, 200_000), (container, 150_000)):
            assert bed.groups.set_quota(path, quota) is True
            assert bed.groups.set_quota(path, quota) is False
            assert bed.groups.quota(path) == quota
        for path in (pod, container):
            assert bed.groups.set_quota(path, -1) is True
            assert bed.groups.set_quota(path, -1) is False
            assert bed.groups.quota(path) == -1
        for path, quota in ((container, 150_000), (pod, 200_000)):
            assert bed.groups.set_quota(path, quota) is True
        assert (bed.groups.quota(pod), bed.groups.quota(container)) == (200_000, 150_000)

    def test_the_period_stays(self, bed: Bed) -> None:
        path = bed.mkdir("a")
        if bed.groups.version == 1:
            bed.put("a", "50000", "cpu.cfs_period_us")
        else:
            bed.put("a", "20000 50000")
        for quota in (30_000, -1, 40_000):
            bed.groups.set_quota(path, quota)
        files = bed.groups._files
        if bed.groups.version == 1:
            assert files.read(path, "cpu.cfs_period_us").strip() == "50000"
        else:
            assert files.read(path, "cpu.max").strip() == "40000 50000"

    def test_a_refusal_is_reported(self, bed: Bed) -> None:
        path = bed.mkdir("a")
        message = refused(errno.EINVAL, lambda: bed.groups.set_quota(path, 500))
        assert "500" in message
        assert path in message
        refused(0, lambda: bed.groups.set_quota(path, 0))
        assert bed.groups.quota(path) == -1

    def test_a_quota_above_that_of_the_parent_is_refused_on_v1(self, bed: Bed) -> None:
        pod, container = bed.mkdir("a"), bed.mkdir("a/b")
        bed.groups.set_quota(pod, 100_000)
        if bed.groups.version == 1:
            assert "ancestor" in refused(errno.EINVAL, lambda: bed.groups.set_quota(container, 200_000))
            bed.groups.set_quota(pod, -1)
        assert bed.groups.set_quota(container, 200_000) is True

    def test_a_removed_group_and_the_root_are_refused(self, bed: Bed) -> None:
        for call in (
            lambda: bed.groups.quota(bed.path("missing")),
            lambda: bed.groups.set_quota(bed.path("missing"), -1),
        ):
            assert "gone" in refused(errno.ENOENT, call)
        refused(errno.EACCES, lambda: bed.groups.set_quota("/", -1))

    def test_the_groups_of_pod_and_container_are_found_by_name(self, bed: Bed) -> None:
        pod, top = bed.mkdir("podx"), f"/{bed.base}"
        container = bed.mkdir("podx/0123456789abcdef")
        sliced = bed.mkdir("kubepods.slice")
        assert bed.groups.find(f"{top}/podx", "0123456789abcdef") == container
        assert bed.groups.pod_group(f"{top}/podx") == pod
        assert bed.groups.pod_group(f"{top}/pody") is None, "the group does not exist"
        for parent in (top, f"/{sliced}", "", "/", f"{top}/podx/0123456789abcdef", f"{top}/../podx"):
            assert bed.groups.pod_group(parent) is None, "the group of several pods"


def test_a_slice_of_systemd_is_found(tmp_path: Path) -> None:
    tree = FakeCgroups(tmp_path, CpuSet.parse("0-1"), Mask.parse("0"), 2)
    path = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podab_c.slice"
    for depth in (1, 2, 3):
        tree.mkdir("/".join(path.split("/")[:depth]))
    groups = open_cpu_groups(tmp_path)
    assert groups.pod_group("kubepods-burstable-podab_c.slice") == path
    assert groups.pod_group("kubepods-burstable.slice") is None


SPIN = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"


@pytest.mark.parametrize("bed", ["kernel-v1"], indirect=True)
def test_a_quota_throttles_a_busy_group(bed: Bed) -> None:
    """A small quota throttles a busy task, also on a busy machine; without a quota nothing does."""
    path = bed.mkdir("busy")
    bed.groups.set_quota(path, 2_000)

    def throttled() -> int:
        lines = bed.groups._files.read(path, "cpu.stat").splitlines()
        return int(dict(line.split() for line in lines)["nr_throttled"])

    task = subprocess.Popen([sys.executable, "-S", "-c", SPIN])
    try:
        bed.groups._files.write(path, "cgroup.procs", str(task.pid))
        end = time.monotonic() + 15
        while not throttled() and time.monotonic() < end:
            time.sleep(0.05)
        assert throttled()
        bed.groups.set_quota(path, -1)
        time.sleep(0.2)
        before = throttled()
        time.sleep(0.5)
        assert throttled() == before
    finally:
        task.kill()
        task.wait()
