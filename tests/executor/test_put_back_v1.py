"""A create that is refused in the middle of shrinking, on the kernel's own groups (cgroup v1)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.api.cri import api_pb2 as pb
from proxy.backends.cgroup.cpuset import KernelCgroups
from proxy.model.idset import CpuSet
from proxy.topology.regular_machine import regular_machine

MOUNT = Path("/sys/fs/cgroup/cpuset")
IDS = ("s-a-c-1", "s-b-c-2", "s-c-c-3")


@pytest.fixture
def base() -> Iterator[Path]:
    """A group for containers, with the CPUs 0 and 1."""
    if os.geteuid() != 0 or not (MOUNT / "cpuset.cpus").is_file():
        pytest.skip("needs root and a cgroup v1 cpuset mount")
    if not CpuSet.parse("0-1") <= CpuSet.parse((MOUNT / "cpuset.cpus").read_text()):
        pytest.skip("needs the CPUs 0 and 1")
    top = MOUNT / f"topoproxy-back-{os.getpid()}"
    made = [top, *(top / name for name in IDS), *(top / name / f"i{i}" for name in IDS for i in range(3))]
    try:
        top.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a cpuset group here: {error}")
    for path in made:
        path.mkdir(exist_ok=True)
        (path / "cpuset.cpus").write_text("0-1")
        (path / "cpuset.mems").write_text((MOUNT / "cpuset.mems").read_text())
    yield top
    for path in reversed(made):
        path.rmdir()


@pytest.fixture
def stuck(base: Path) -> Iterator[Path]:
    """An unwritable file below the second container, in the group that is written last."""
    path = base / IDS[1]
    last = KernelCgroups(MOUNT, 1).children(str(path.relative_to(MOUNT)))[-1]
    file = str(path / last / "cpuset.cpus")
    if subprocess.run(["mount", "--bind", file, file], capture_output=True, check=False).returncode:
        pytest.skip("cannot mount here")
    subprocess.run(["mount", "-o", "remount,ro,bind", file], check=True)
    yield Path(file)
    subprocess.run(["umount", file], check=True)


def test_every_container_keeps_its_set_after_a_refused_create(
    run_scenario: Callable[..., None], base: Path, stuck: Path
) -> None:
    """The second of three containers cannot be narrowed; the first one and its inner groups have been."""
    kernel = KernelCgroups(MOUNT, 1)
    narrowed: list[str] = []

    class Groups:
        """The kernel's groups by container id."""

        version = 1

        def find(self, parent: str, container_id: str) -> str | None:
            return f"{base.name}/{container_id}" if (base / container_id).is_dir() else None

        def write(self, path: str, cpus: Any, mems: Any, *, adjust_below: bool = True) -> bool:
            written = kernel.write(path, cpus, None, adjust_below=adjust_below)
            if written and cpus == CpuSet([0]):
                narrowed.append(path.rpartition("/")[2])
            return written

        def __getattr__(self, name: str) -> Any:
            return getattr(kernel, name)

    def held() -> dict[str, str]:
        files = base.rglob("cpuset.cpus")
        return {str(file.relative_to(base)): file.read_text() for file in files}

    async def scenario(world: Any) -> None:
        world.machine, world.cgroups = regular_machine(1, 1, 2, 1), Groups()
        await world.executor.close()
        world.boot()
        await world.sync.once()
        before = held()
        for uid in "abc":
            container_id = await world.create(await world.pod(uid, "LS"))
            await started(world, container_id)
        assert set(world.executor.state.containers) == set(IDS)
        call = await world.begin(await world.pod("lse", "LSE", "", "1"))
        assert call.refused is not None
        assert "ead-only" in call.refused[1]
        assert {IDS[0], IDS[2]} <= set(narrowed)
        await world.until(lambda: held() == before)
        assert not world.executor.state.owners

    run_scenario(scenario, reconciled=False)


async def started(world: Any, container_id: str) -> None:
    """Run a container that already has its group."""
    call = await world.call("StartContainer", pb.StartContainerRequest(container_id=container_id))
    world._state(container_id, "RUNNING")
    world.wire.finished(call, 0)
    await world.quiet()
