"""Lists of groups above containers."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from proxy.backends.cgroup.fences import KernelFences
from proxy.model.errors import CgroupError
from proxy.model.idset import CpuSet


@pytest.fixture
def slice_file(tmp_path: Path) -> Path:
    directory = tmp_path / "kubepods.slice/kubepods-podx.slice"
    directory.mkdir(parents=True)
    (directory / "cpuset.cpus").write_text("\n")
    return directory / "cpuset.cpus"


def test_a_swap_writes_and_returns_the_previous_value(tmp_path: Path, slice_file: Path) -> None:
    fences, path = KernelFences(tmp_path), "kubepods.slice/kubepods-podx.slice"
    assert fences.replace_cpus(path, CpuSet.parse("2-3")) == CpuSet()
    assert slice_file.read_text() == "2-3\n"
    assert fences.replace_cpus(path, CpuSet.parse("0-7")) == CpuSet.parse("2-3")


def test_an_unchanged_value_is_not_written(tmp_path: Path, slice_file: Path) -> None:
    slice_file.write_text("2-3\n")
    slice_file.chmod(0o444)
    before = slice_file.stat().st_mtime_ns
    KernelFences(tmp_path).replace_cpus("kubepods.slice/kubepods-podx.slice", CpuSet.parse("2-3"))
    assert slice_file.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("path", "cpus", "number"),
    [
        ("kubepods.slice/kubepods-pody.slice", "1", errno.ENOENT),
        ("kubepods.slice/kubepods-podx.slice", "", errno.EINVAL),
        ("/", "1", errno.EINVAL),
    ],
)
def test_an_impossible_swap_is_an_error(
    tmp_path: Path, slice_file: Path, path: str, cpus: str, number: int
) -> None:
    with pytest.raises(CgroupError, match="cannot set CPUs") as caught:
        KernelFences(tmp_path).replace_cpus(path, CpuSet.parse(cpus))
    assert caught.value.errno == number
    assert slice_file.read_text() == "\n"


def test_a_file_without_a_cpu_list_is_an_error(tmp_path: Path, slice_file: Path) -> None:
    slice_file.write_text("what\n")
    with pytest.raises(CgroupError, match="cannot read CPUs"):
        KernelFences(tmp_path).replace_cpus("kubepods.slice/kubepods-podx.slice", CpuSet([1]))
