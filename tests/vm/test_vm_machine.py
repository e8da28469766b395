"""The configuration of the scenarios' virtual machines: qemu accepts it. No machine is booted."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from disk import cpio, with_needed
from machine import EXPANDER, LOCAL, REMOTE, SOCKET, VirtualMachine

ODD = VirtualMachine(
    cores=2, memory_only=1, without_memory=(2,), distances=True, cards=(3, 0), kernel="isolcpus=12-13"
)
PLUGGED = VirtualMachine(nodes=1, plugged=256, distances=True)


def test_distances_depend_on_sockets_and_expanders() -> None:
    table = [[ODD.distance(one, other) for other in range(5)] for one in range(5)]
    assert table[0] == [LOCAL, SOCKET, REMOTE, REMOTE, EXPANDER]
    assert table[3] == [REMOTE, REMOTE, SOCKET, LOCAL, EXPANDER]
    assert all(table[i][j] == table[j][i] for i in range(5) for j in range(5))


def test_numa_nodes_have_their_cpus_and_memory() -> None:
    args = ODD.qemu(Path("/disk"), Path("/work"))
    assert args[args.index("-m") + 1] == "2048M"
    nodes = [word for word in args if word.startswith("node,")]
    assert nodes[1:4] == [
        "node,nodeid=1,cpus=4-7,memdev=mem1",
        "node,nodeid=2,cpus=8-11",
        "node,nodeid=3,cpus=12-15,memdev=mem3",
    ]
    assert nodes[4] == "node,nodeid=4,memdev=mem4"
    assert sum(word.startswith("dist,") for word in args) == 20


def test_plugged_memory_is_a_dimm_of_a_further_numa_node() -> None:
    args = PLUGGED.qemu(Path("/disk"), Path("/work"))
    assert args[args.index("-m") + 1] == "1024M,slots=1,maxmem=1280M"
    assert [word for word in args if word.startswith("node,")][2:] == ["node,nodeid=2"]
    assert "pc-dimm,memdev=plugged,node=2" in args
    assert sum(word.startswith("dist,") for word in args) == 6
    assert "memhp_default_state=online_movable" in PLUGGED.command_line()


def test_a_machine_has_a_network_only_if_configured() -> None:
    args = VirtualMachine(network=True).qemu(Path("/disk"), Path("/work"))
    assert args[args.index("-netdev") + 2 :][:2] == ["-device", "virtio-net-pci,netdev=net"]
    assert "net.ifnames=0" in VirtualMachine(network=True).command_line(), (
        "guest.sh configures the interface eth0"
    )
    assert "-netdev" not in VirtualMachine().qemu(Path("/disk"), Path("/work"))


@pytest.mark.parametrize(
    ("cgroup", "expected"), [("v2", "hierarchy=1"), ("v1", "hierarchy=0"), ("hybrid", "hierarchy=0")]
)
def test_systemd_gets_the_cgroup_version(cgroup: str, expected: str) -> None:
    assert expected in VirtualMachine(cgroup=cgroup, driver="systemd").command_line()
    assert "systemd" not in VirtualMachine(cgroup=cgroup).command_line()
    legacy = (
        "legacy_systemd_cgroup_controller=1" in VirtualMachine(cgroup=cgroup, driver="systemd").command_line()
    )
    assert legacy is (cgroup == "v1"), "without the argument systemd mounts v2 beside v1"
    assert ODD.command_line().endswith(" isolcpus=12-13")
    assert len(VirtualMachine(cgroup="v1", driver="systemd").command_line()) < 2048  # the kernel's limit


@pytest.mark.skipif(shutil.which("qemu-system-x86_64") is None, reason="qemu is not installed")
@pytest.mark.parametrize(
    "machine",
    [VirtualMachine(), VirtualMachine(nodes=1), ODD, PLUGGED, VirtualMachine(network=True)],
    ids=["four", "two", "odd", "plugged", "network"],
)
def test_qemu_accepts_the_command_line(machine: VirtualMachine, tmp_path: Path) -> None:
    for name in ("disk.img", "in.tar", "out.tar"):
        (tmp_path / name).write_bytes(bytes(1 << 20))
    args = machine.qemu(tmp_path, tmp_path)
    args = [*args[: args.index("-kernel")], "-S", "-qmp", "stdio"]
    commands = "".join(json.dumps({"execute": word}) for word in ("qmp_capabilities", "quit"))
    done = subprocess.run(args, input=commands, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_kernel_modules_come_after_their_dependencies(tmp_path: Path) -> None:
    (tmp_path / "modules.dep").write_text("k/a.ko: k/b.ko k/c.ko\nk/b.ko: k/c.ko\nk/c.ko.xz:\nk/d.ko:\n")
    assert [path.name for path in with_needed(["a", "d"], tmp_path)] == ["c.ko.xz", "b.ko", "a.ko", "d.ko"]


@pytest.mark.skipif(shutil.which("busybox") is None, reason="busybox is not installed")
def test_busybox_unpacks_the_cpio_archive(tmp_path: Path) -> None:
    archive = cpio(iter([("bin", 0o40755, b""), ("bin/a", 0o100644, b"some"), ("b", 0o100755, b"more text")]))
    subprocess.run(["busybox", "cpio", "-id"], input=archive, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "bin/a").read_bytes() == b"some"
    assert (tmp_path / "b").read_bytes() == b"more text"
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o755
