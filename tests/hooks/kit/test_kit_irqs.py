"""Moving interrupts away from claimed CPUs, on a simulated tree."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.hooks.kit.irqs import Irqs, MovedIrqs, mask_from, mask_text, shared_irqs
from proxy.hooks.kit.kernel_settings import put
from proxy.model.errors import HookError
from proxy.model.idset import CpuSet

ONLINE = CpuSet(range(8))


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


class Tree:
    """Interrupts of a machine in a directory."""

    def __init__(self, root: Path, **affinity: str) -> None:
        self.proc = root / "proc"
        self.state = root / "state.json"
        (self.proc / "irq").mkdir(parents=True)
        (self.proc / "irq/default_smp_affinity").write_text("ff\n")
        for name, text in affinity.items():
            self.add(name, text)

    def add(self, name: str, text: str) -> None:
        directory = self.proc / "irq" / name.removeprefix("irq")
        directory.mkdir()
        (directory / "smp_affinity_list").write_text(f"{text}\n")

    def __getitem__(self, number: int) -> str:
        return (self.proc / f"irq/{number}/smp_affinity_list").read_text().strip()

    @property
    def default(self) -> str:
        return (self.proc / "irq/default_smp_affinity").read_text().strip()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path, irq1="0-7", irq2="2-3", irq3="0,2", irq4="6")


def test_interrupts_are_moved_and_restored(tree: Tree) -> None:
    irqs = Irqs(tree.proc, tree.state)
    assert irqs.claim("a", cpus("2-3"), ONLINE) == MovedIrqs(written=4)
    assert [tree[n] for n in (1, 2, 3, 4)] == ["0-1,4-7", "0-1,4-7", "0", "6"]
    assert tree.default == "000000f3"
    assert irqs.claim("a", cpus("2-3"), ONLINE) == MovedIrqs()
    assert irqs.claim("a", CpuSet(), ONLINE) == MovedIrqs(written=4)
    assert [tree[n] for n in (1, 2, 3, 4)] == ["0-7", "2-3", "0,2", "6"]
    assert mask_from(tree.default) == ONLINE


def test_a_mask_that_the_kernel_writes_shorter_is_not_written_again(tree: Tree) -> None:
    """The kernel shows as many digits as the machine has CPUs (lib/bitmap-str.c, bitmap_print_to_pagebuf)."""
    irqs = Irqs(tree.proc, tree.state)
    irqs.claim("a", cpus("2-3"), ONLINE)
    (tree.proc / "irq/default_smp_affinity").write_text("f3\n")
    assert irqs.claim("a", cpus("2-3"), ONLINE) == MovedIrqs()
    assert tree.default == "f3"


def test_claims_of_several_owners_are_combined(tree: Tree) -> None:
    one, two = shared_irqs(tree.proc, tree.state), shared_irqs(tree.proc, tree.state)
    one.claim("a", cpus("2-3"), ONLINE)
    two.claim("b", cpus("3,6"), ONLINE)
    assert [tree[n] for n in (1, 2, 3, 4)] == ["0-1,4-5,7", "0-1,4-5,7", "0", "0-1,4-5,7"]
    one.claim("a", CpuSet(), ONLINE)
    assert [tree[n] for n in (1, 2, 3, 4)] == ["0-2,4-5,7", "2", "0,2", "0-2,4-5,7"]
    two.claim("b", CpuSet(), ONLINE)
    assert [tree[n] for n in (1, 2, 3, 4)] == ["0-7", "2-3", "0,2", "6"]


def test_irqs_that_irqbalance_moved_are_moved_again_then_left(tree: Tree) -> None:
    irqs = Irqs(tree.proc, tree.state)
    irqs.claim("a", cpus("2-3"), ONLINE)
    (tree.proc / "irq/1/smp_affinity_list").write_text("3-4")
    irqs.claim("a", cpus("2-3"), ONLINE)
    assert tree[1] == "4"
    irqs.claim("a", CpuSet(), ONLINE)
    assert tree[1] == "3-4"


def test_a_new_process_restores_the_saved_affinity(tree: Tree) -> None:
    Irqs(tree.proc, tree.state).claim("a", cpus("2-3"), ONLINE)
    Irqs(tree.proc, tree.state).claim("a", cpus("2"), ONLINE)
    assert [tree[n] for n in (1, 2, 3, 4)] == ["0-1,3-7", "3", "0", "6"]
    Irqs(tree.proc, tree.state).claim("b", CpuSet(), ONLINE)
    assert [tree[n] for n in (1, 2, 3, 4)] == ["0-7", "2-3", "0,2", "6"]


def test_a_new_interrupt_is_restored_to_the_original_default(tree: Tree) -> None:
    irqs = Irqs(tree.proc, tree.state)
    irqs.claim("a", cpus("2-3"), ONLINE)
    tree.add("irq9", "0-1,4-7")
    tree.add("irq10", "0-1,4-6")
    irqs.claim("a", cpus("4"), ONLINE)
    assert (tree[9], tree[10]) == ("0-3,5-7", "0-1,5-6")
    irqs.claim("a", CpuSet(), ONLINE)
    assert (tree[9], tree[10]) == ("0-7", "0-1,4-6"), "only interrupts with the default affinity"


def test_interrupts_are_not_moved_if_all_cpus_are_claimed(tree: Tree) -> None:
    irqs = Irqs(tree.proc, tree.state)
    assert irqs.claim("a", ONLINE, ONLINE) == MovedIrqs()
    assert tree[1] == "0-7"


def test_interrupts_leave_claimed_cpus_although_their_other_cpus_are_offline(tree: Tree) -> None:
    online = cpus("0-3")

    def refusing(path: Path, value: str) -> None:
        affinity = mask_from(value) if path.name == "default_smp_affinity" else cpus(value)
        if affinity.isdisjoint(online):  # kernel/irq/proc.c
            raise OSError(errno.EINVAL, "Invalid argument")
        put(path, value)

    tree.add("irq5", "2,6")
    (tree.proc / "irq/default_smp_affinity").write_text("44\n")
    irqs = Irqs(tree.proc, tree.state, refusing)
    assert irqs.claim("a", cpus("2"), online).stay == 0
    assert (tree[5], mask_from(tree.default)) == ("0-1,3", cpus("0-1,3"))
    online = ONLINE
    irqs.claim("a", cpus("2"), online)
    assert (tree[5], mask_from(tree.default)) == ("6", cpus("6")), "the other CPUs are back"
    irqs.claim("a", CpuSet(), online)
    assert (tree[5], mask_from(tree.default)) == ("2,6", cpus("2,6"))


def test_managed_interrupts_are_counted(tree: Tree) -> None:
    def managed(path: Path, value: str) -> None:
        if "/2/" in str(path):
            raise OSError(errno.EIO, "Input/output error")
        put(path, value)

    irqs = Irqs(tree.proc, tree.state, managed)
    assert irqs.claim("a", cpus("2-3"), ONLINE) == MovedIrqs(written=3, stay=1)
    assert irqs.claim("a", cpus("2-3"), ONLINE) == MovedIrqs(written=0, stay=1)


def test_a_read_only_tree_names_the_drop_in(tree: Tree) -> None:
    def read_only(path: Path, value: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    irqs = Irqs(tree.proc, tree.state, read_only)
    with pytest.raises(
        HookError, match=r"ProtectKernelTunables=.*30-irq-affinity\.conf of the package's documentation"
    ):
        irqs.claim("a", cpus("2-3"), ONLINE)


def test_a_state_that_cannot_be_saved_is_an_error(tree: Tree) -> None:
    irqs = Irqs(tree.proc, tree.proc / "irq/default_smp_affinity/state.json")
    with pytest.raises(HookError, match="cannot remember"):
        irqs.claim("a", cpus("2-3"), ONLINE)
    assert tree[1] == "0-7"


def test_unusual_files_are_ignored(tree: Tree) -> None:
    tree.add("irq7", "")
    tree.add("irq8", "nonsense")
    (tree.proc / "irq/none").mkdir()
    (tree.proc / "irq/10").mkdir()
    (tree.proc / "irq/default_smp_affinity").write_text("zz")
    irqs = Irqs(tree.proc, tree.state)
    assert irqs.claim("a", cpus("2-3"), ONLINE) == MovedIrqs(written=3)
    assert (tree[7], tree[8], tree.default) == ("", "nonsense", "zz")
    assert Irqs(tree.proc / "nowhere", tree.state).claim("a", cpus("2-3"), ONLINE).stay == 0


@given(st.sets(st.integers(0, 300)))
def test_a_mask_is_read_as_it_was_written(ids: set[int]) -> None:
    assert mask_from(mask_text(CpuSet(ids))) == CpuSet(ids)


def test_masks_are_written_as_by_the_kernel() -> None:
    assert mask_from("3") == CpuSet((0, 1))
    assert mask_from("1,00000000\n") == CpuSet((32,))
    assert mask_from("ff,ffffffff,fffffff0") == CpuSet(range(4, 72))
    assert mask_text(CpuSet((32, 64))) == "00000001,00000001,00000000"
