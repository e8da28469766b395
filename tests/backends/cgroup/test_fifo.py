"""A FIFO in the place of a cgroup file is an error, and nothing blocks on it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.backends.cgroup.cpu_usage import V1_FILE, CgroupUsage
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.backends.cgroup.fences import KernelFences
from proxy.backends.cgroup.files import OsCgroupFiles, read_kernel_file
from proxy.engine.be_usage import UsageGroup
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet, Mask

NAME = "cpuset.cpus"


@pytest.fixture
def group(tmp_path: Path) -> Path:
    (tmp_path / "g").mkdir()
    os.mkfifo(tmp_path / "g" / NAME)
    return tmp_path


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "work",
    [
        lambda root: OsCgroupFiles(root).read("g", NAME),
        lambda root: OsCgroupFiles(root).write("g", NAME, "0-3"),
        lambda root: read_kernel_file(root / "g" / NAME),
    ],
)
def test_a_fifo_is_refused_at_once(group: Path, work: Callable[[Path], object]) -> None:
    with pytest.raises(OSError) as raised:
        work(group)
    assert raised.value.errno in (errno.ENXIO, errno.ESPIPE)


@pytest.mark.timeout(30)
def test_a_fifo_with_an_open_reader_is_refused_too(group: Path) -> None:
    other = os.open(group / "g" / NAME, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(other, b"0-3\n")
        for work in (
            lambda: OsCgroupFiles(group).read("g", NAME),
            lambda: OsCgroupFiles(group).write("g", NAME, "1"),
        ):
            with pytest.raises(OSError) as raised:
                work()
            assert raised.value.errno == errno.ESPIPE
        assert os.read(other, 100) == b"0-3\n", "nothing was written into it"
    finally:
        os.close(other)


@pytest.mark.timeout(30)
def test_a_bulk_write_skips_a_fifo(group: Path) -> None:
    (group / "h").mkdir()
    (group / "h" / NAME).write_text("0-3\n")
    assert OsCgroupFiles(group).write_if_different(["g", "h"], NAME, b"0-1\n") == [None, b"0-3\n"]


@pytest.mark.timeout(30)
def test_fences_and_counters_refuse_a_fifo(group: Path) -> None:
    with pytest.raises(CgroupError, match="not a kernel file"):
        KernelFences(group).replace_cpus("g", CpuSet.parse("0"))
    directory = group / "kubepods" / "podu"
    directory.mkdir(parents=True)
    os.mkfifo(directory / V1_FILE)
    with pytest.raises(CgroupError, match="CPU time"):
        CgroupUsage(group, V1_FILE).read({"s": UsageGroup("/kubepods/podu", ())})


@pytest.mark.timeout(30)
def test_a_tree_refuses_a_fifo_and_accepts_the_restored_file(tmp_path: Path) -> None:
    tree = FakeCgroups(tmp_path, CpuSet.parse("0-7"), Mask.parse("0"), 1)
    tree.mkdir("g")
    tree.write("g", CpuSet.parse("0-7"), None)
    file = tmp_path / "g" / NAME
    file.rename(tmp_path / "kept")
    os.mkfifo(file)
    with pytest.raises(CgroupError, match="not a kernel file"):
        tree.write("g", CpuSet.parse("0-3"), None)
    file.unlink()
    (tmp_path / "kept").rename(file)
    assert tree.write("g", CpuSet.parse("0-3"), None)
    assert str(tree.read("g").cpus) == "0-3"
