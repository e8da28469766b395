"""Reading PCI functions from sysfs: kinds, NUMA nodes, and unknown values."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from proxy.model.idset import Mask
from proxy.topology.pci import PciFunction, nvidia_addresses, pci_functions
from proxy.topology.regular_machine import regular_machine
from proxy.topology.sysfs_writer import write_sysfs
from tests.testkit.pci_tree import PciTree

SHARED = Path(__file__).resolve().parents[3] / "shared" / "machines"
UUID = "GPU-11111111-2222-3333-4444-555555555555"


@pytest.fixture
def pci(tmp_path: Path) -> PciTree:
    write_sysfs(regular_machine(2, 1, 4, 2), tmp_path)
    return PciTree(tmp_path / "sys")


def only(pci: PciTree) -> PciFunction:
    (function,) = pci_functions(pci.sysfs)
    return function


def test_a_network_card(pci: PciTree) -> None:
    pci.add("0000:3b:00.0", "0x020000", "1", driver="mlx5_core", names=("net/eth1", "infiniband/mlx5_0"))
    assert only(pci) == PciFunction(
        "0000:3b:00.0",
        "020000",
        "0x15b3",
        "0x1017",
        "mlx5_core",
        ("eth1", "mlx5_0"),
        "",
        Mask([1]),
        "numa_node of PCI device 0000:3b:00.0",
    )
    assert (only(pci).kind, only(pci).is_assignable) == ("network", True)


@pytest.mark.parametrize("node", ["-1", "", "7", "x"])
def test_a_node_that_is_not_reported_is_unknown(pci: PciTree, node: str) -> None:
    pci.add("0000:3b:00.0", "0x020000", node)
    assert only(pci).nodes is None
    assert only(pci).source


def test_a_virtual_function_names_its_physical_one(pci: PciTree) -> None:
    pci.add("0000:3b:00.0", "0x020000", "0")
    pci.add("0000:3b:02.0", "0xff0000", "0", physical="0000:3b:00.0")
    first, second = pci_functions(pci.sysfs)
    assert (first.physical, second.physical) == ("", "0000:3b:00.0")
    assert second.is_assignable, "independently of its class"


@pytest.mark.parametrize(
    ("code", "kind", "assignable"),
    [
        ("0x010802", "storage", True),
        ("0x030000", "display", True),
        ("0x030200", "3D controller", True),
        ("0x020700", "InfiniBand", True),
        ("0x0b4000", "coprocessor", True),
        ("0x0b2000", "processor", False),
        ("0x120000", "accelerator", True),
        ("0x0c0330", "serial bus", False),
        ("0x060400", "bridge", False),
        ("0xffff00", "", False),
        ("nonsense", "", False),
        ("", "", False),
    ],
)
def test_the_class_code_determines_the_kind_of_a_device(
    pci: PciTree, code: str, kind: str, assignable: bool
) -> None:
    pci.add("0000:00:01.0", code)
    assert (only(pci).kind, only(pci).is_assignable) == (kind, assignable)


def test_names_behind_a_virtio_device(pci: PciTree) -> None:
    pci.add("0000:00:02.0", "0x018000", names=("virtio1/block/vda", "virtiofs", "power"))
    assert only(pci).interfaces == ("vda",)


def test_a_machine_without_a_pci_bus(tmp_path: Path) -> None:
    assert pci_functions(tmp_path) == ()


def test_ids_of_nvidia(tmp_path: Path) -> None:
    for address, text in {"0000:3B:00.0": f"Model: \t H\nGPU UUID: \t {UUID}\n", "0000:5e:00.0": "x"}.items():
        (tmp_path / "driver/nvidia/gpus" / address).mkdir(parents=True)
        (tmp_path / "driver/nvidia/gpus" / address / "information").write_text(text)
    assert nvidia_addresses(tmp_path) == {UUID: "0000:3b:00.0"}
    assert nvidia_addresses(tmp_path / "nothing") == {}


def test_a_real_machine(tmp_path: Path) -> None:
    archive = SHARED / "40intel64-2g2n4c+pcilocality.tar.bz2"
    if not archive.exists():
        pytest.skip("the snapshot is not there")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    (sysfs,) = tmp_path.glob("*/sys")
    assignable = {f.address: f for f in pci_functions(sysfs) if f.is_assignable}
    card = assignable["0000:43:00.0"]
    assert (card.kind, card.nodes, card.interfaces) == ("InfiniBand", Mask([2]), ("ib0", "qib0"))
    assert assignable["0000:02:00.0"].nodes is None
