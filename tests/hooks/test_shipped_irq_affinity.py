"""The shipped hook 40-irq-affinity, on a simulated tree of interrupts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.hooks import samples, testing
from proxy.hooks.events import Shutdown
from proxy.hooks.facts import Pools
from proxy.model.idset import CpuSet

HOOK = Path(__file__).resolve().parents[2] / "hooks/40-irq-affinity.py"
ALL, FREE = "0-15", "0-1,6-15"
OWNER = {"container": samples.existing(container_id="c1"), "decision": testing.decision("own", "2-5")}


class Node:
    """The hook, and one interrupt that may use any CPU."""

    def __init__(self, root: Path, **config: Any) -> None:
        self.root = root
        self.config = {"proc": str(root / "proc"), "state": str(root / "irqs.json"), **config}
        self.file = root / "proc/irq/9/smp_affinity_list"
        if not self.file.exists():
            self.file.parent.mkdir(parents=True)
            self.file.write_text(f"{ALL}\n")
            (root / "proc/irq/default_smp_affinity").write_text("ffff\n")
        self.hook = testing.load(HOOK, self.config)
        self.handle("synchronize", containers=(), pods=())

    def handle(self, point: str, **fields: Any) -> None:
        testing.run(self.hook, testing.event(point, **fields))

    @property
    def irq(self) -> str:
        return self.file.read_text().strip()

    @property
    def default(self) -> int:
        return int((self.root / "proc/irq/default_smp_affinity").read_text(), 16)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_interrupts_avoid_owned_cpus_while_they_are_owned(node: Node) -> None:
    node.handle("post_create_container", **OWNER)
    assert (node.irq, node.default) == (FREE, 0xFFC3)
    other = {"container": samples.existing(container_id="c2"), "decision": testing.decision("own", "6")}
    node.handle("post_create_container", **other)
    assert node.irq == "0-1,7-15"
    node.handle("post_stop_container", **OWNER)
    assert node.irq == "0-5,7-15"
    node.handle("post_remove_container", container=other["container"])
    assert (node.irq, node.default) == (ALL, 0xFFFF)


def test_a_container_in_the_shared_pool_moves_no_interrupts(node: Node) -> None:
    shared = testing.decision("shared", "2-5")
    node.handle("post_create_container", container=OWNER["container"], decision=shared)
    assert node.irq == ALL
    assert not (node.root / "irqs.json").exists()


def test_interrupts_follow_owners_that_move(node: Node) -> None:
    node.handle("post_create_container", **OWNER)
    moved = CpuSet((8, 9))
    node.handle("pools_changed", before=Pools(), after=Pools(owned=moved, owners={"c1": moved}))
    assert node.irq == "0-7,10-15"
    node.handle("machine_changed", before=samples.machine("before"), after=samples.machine("after"))
    assert node.irq == "0-7,10-15"


def test_existing_owners_are_adopted_and_stale_changes_are_restored(tmp_path: Path) -> None:
    Node(tmp_path).handle("post_create_container", **OWNER)
    again = Node(tmp_path)  # the daemon was killed, and meanwhile the container has ended
    assert again.irq == ALL
    one = testing.running("c1", decision=testing.decision("own", "2-5"))
    again.handle("synchronize", containers=(one,))
    assert again.irq == FREE


def test_only_pods_with_the_annotation_move_interrupts(tmp_path: Path) -> None:
    node = Node(tmp_path, annotation="quiet=yes")
    node.handle("post_create_container", **OWNER, pod=testing.pod(annotations={"quiet": "no"}))
    assert node.irq == ALL
    node.handle("post_create_container", **OWNER, pod=testing.pod(annotations={"quiet": "yes"}))
    assert node.irq == FREE


@pytest.mark.parametrize(
    ("reason", "restore", "affinity"),
    [
        ("stop", True, ALL),
        ("stop", False, FREE),
        ("removed", False, ALL),
        ("replaced", True, FREE),
    ],
)
def test_interrupts_are_restored_at_the_shutdown(
    tmp_path: Path, reason: str, restore: bool, affinity: str
) -> None:
    node = Node(tmp_path, give_back=restore)
    node.handle("post_create_container", **OWNER)
    testing.run(node.hook, Shutdown(reason))
    assert node.irq == affinity


def test_a_new_version_takes_over_and_the_old_ones_end_changes_nothing(tmp_path: Path) -> None:
    old = Node(tmp_path)
    old.handle("post_create_container", **OWNER)
    new = testing.load(HOOK, old.config)
    existing_container = testing.running("c1", decision=testing.decision("own", "2-3"))
    testing.run(new, testing.event("synchronize", containers=(existing_container,)))
    testing.run(old.hook, Shutdown("replaced"))
    assert old.irq == "0-1,4-15"
    testing.run(new, Shutdown("removed"))
    assert old.irq == ALL


def test_the_error_of_a_failed_write_names_the_drop_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from proxy.hooks.kit import irqs

    def refuse(path: Path, value: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    state = tmp_path / "irqs.json"
    monkeypatch.setattr(irqs, "shared_irqs", lambda proc, _: irqs.Irqs(proc, state, refuse))
    node = Node(tmp_path)
    with pytest.raises(AssertionError, match=r"ProtectKernelTunables.*30-irq-affinity\.conf"):
        node.handle("post_create_container", **OWNER)
    assert node.irq == ALL
