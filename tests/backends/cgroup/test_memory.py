"""Reading on which NUMA nodes memory is: the formats of v1 and v2, and this machine's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.backends.cgroup.memory import KernelMemory, open_memory, parse_memory_use
from proxy.executor.kernel_ports import MemoryUse
from proxy.model.errors import CgroupError
from proxy.model.idset import Mask

V2 = """anon N0=128614400 N1=0
file N0=41947136 N1=28672
kernel_stack N0=16384 N1=0
shmem N0=0 N1=0
"""
V1 = """total=41647 N0=41647 N1=0
file=8 N0=8 N1=0
anon=41600 N0=41600 N1=0
unevictable=39 N0=39 N1=0
"""
BELOW = """hierarchical_total=50 N0=30 N1=20
hierarchical_file=5 N0=0 N1=5
hierarchical_anon=45 N0=30 N1=15
"""
HUGE = "total=4194304 N0=2097152 N1=2097152\n"


def test_memory_use_by_node_is_read_from_cgroup_v2() -> None:
    use = parse_memory_use(V2, 2, HUGE)
    assert use == MemoryUse({0: 128614400}, {0: 41947136, 1: 28672}, {0: 2097152, 1: 2097152})
    assert use.outside(Mask((0,))) == (2097152, 28672)
    assert use.outside(Mask((0, 1))) == (0, 0)


def test_version_1_counts_what_is_locked() -> None:
    assert parse_memory_use(V1, 1) == MemoryUse({0: 41639 * 4096}, {0: 8 * 4096}, {})


def test_groups_below_count() -> None:
    assert parse_memory_use(V1 + BELOW, 1) == MemoryUse({0: 30 * 4096, 1: 15 * 4096}, {1: 5 * 4096}, {})
    both = "total=1 N0=1\nhierarchical_total=3 N0=1 N1=2\n"
    assert parse_memory_use(V1, 1, both + both).huge == {0: 2, 1: 4}


@pytest.mark.parametrize(("text", "version"), [("", 1), ("", 2), ("anon N0=1\n", 2), ("total=1 N0=1\n", 1)])
def test_a_file_of_another_kind(text: str, version: int) -> None:
    with pytest.raises(CgroupError, match=r"^cannot read memory\.numa_stat: it has no lines for"):
        parse_memory_use(text, version)


@pytest.fixture(params=[1, 2])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """An imitated hierarchy, and the group of container ``c`` of pod ``podx`` in it."""
    if request.param == 2:
        (tmp_path / "cgroup.controllers").write_text("cpuset memory\n")
        group = tmp_path / "kubepods/podx/c"
        group.mkdir(parents=True)
        (group / "memory.numa_stat").write_text(V2)
    else:
        group = tmp_path / "memory/kubepods/podx/c"
        group.mkdir(parents=True)
        (tmp_path / "memory/memory.numa_stat").write_text(V1)
        (group / "memory.numa_stat").write_text(V1)
        (tmp_path / "cpuset/kubepods/podx/c").mkdir(parents=True)
    return tmp_path, group


def test_a_containers_memory(tree: tuple[Path, Path]) -> None:
    root, group = tree
    memory = open_memory(root)
    assert memory is not None
    use = memory.memory_use("/kubepods/podx", "c")
    assert use is not None
    assert use.anon.keys() == {0}
    assert memory.memory_use("/kubepods/podx", "other") is None
    assert memory.migrates_pages("kubepods/podx/c") is (memory.version == 2)
    (group / "memory.numa_stat").unlink()
    with pytest.raises(CgroupError, match=r"cannot read memory\.numa_stat of cgroup /kubepods/podx/c"):
        memory.memory_use("/kubepods/podx", "c")
    group.rmdir()
    assert memory.memory_use("/kubepods/podx", "c") is None


def test_memory_migrate_of_v1_is_read(tmp_path: Path) -> None:
    group = tmp_path / "cpuset/g"
    group.mkdir(parents=True)
    memory = KernelMemory(tmp_path / "memory", 1, v1_cpuset_root=tmp_path / "cpuset")
    for text, moves in (("0\n", False), ("1\n", True)):
        (group / "cpuset.memory_migrate").write_text(text)
        assert memory.migrates_pages("g") is moves
    assert not memory.migrates_pages("gone")


def test_a_machine_without_the_memory_controller(tmp_path: Path) -> None:
    assert open_memory(tmp_path) is None
    (tmp_path / "cgroup.controllers").write_text("cpuset\n")
    assert open_memory(tmp_path) is None


def test_a_group_of_v2_with_the_name_memory_is_not_v1(tmp_path: Path) -> None:
    for group in (tmp_path, tmp_path / "memory"):
        group.mkdir(exist_ok=True)
        (group / "cgroup.controllers").write_text("cpuset memory\n")
        (group / "memory.numa_stat").write_text("anon N0=0\n")
    found = open_memory(tmp_path)
    assert found is not None
    assert (found.root, found.version) == (tmp_path, 2)


def test_beside_a_mount_of_the_cpuset_controller(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.numa_stat").write_text(V1)
    (tmp_path / "cpuset").mkdir()
    (tmp_path / "cpuset/cpuset.cpus").write_text("0\n")
    found = open_memory(tmp_path / "cpuset")
    assert found is not None
    assert found.root == tmp_path / "memory"
