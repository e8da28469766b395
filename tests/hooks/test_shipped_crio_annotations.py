"""The shipped hook 50-crio-annotations, on simulated trees of the kernel's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.hooks import samples, testing
from proxy.hooks.events import Shutdown
from proxy.hooks.facts import Resources
from proxy.logs import log
from tests.testkit.changed_copy import changed_copy

HOOK = Path(__file__).resolve().parents[2] / "hooks/50-crio-annotations.py"
UID = "0f9a3c52-6f0f-4c43-9d0e-3f6d5a1c7e11"
OWN = testing.decision("own", "2-5", unlimited=False)
CONTAINER = samples.existing(testing.container(), "c1")


class Node:
    """The hook with the kernel's files in a directory."""

    def __init__(self, root: Path, **config: Any) -> None:
        self.root = root
        for path, text in {
            "proc/irq/9/smp_affinity_list": "0-15",
            "proc/irq/default_smp_affinity": "ffff",
            f"cgroup/cpu/kubepods/pod{UID}/cpu.cfs_quota_us": "400000",
            "cgroup/cpuset/cpuset.sched_load_balance": "1",
            f"cgroup/cpuset/kubepods/pod{UID}/c1/cpuset.sched_load_balance": "1",
            **{f"sys/devices/system/cpu/cpu{n}/power/pm_qos_resume_latency_us": "0" for n in range(16)},
            **{f"sys/devices/system/cpu/cpu{n}/cpufreq/scaling_governor": "powersave" for n in range(16)},
            **{
                f"sys/devices/system/cpu/cpu{n}/cpufreq/scaling_available_governors": "performance powersave"
                for n in range(16)
            },
        }.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(f"{text}\n")
        places = {"cgroup_root": "cgroup", "proc": "proc", "sysfs": "sys"}
        places |= {"irq_state": "irqs.json", "power_state": "power.json"}
        paths = {key: str(root / name) for key, name in places.items()}
        self.hook = testing.load(HOOK, {**paths, **config})
        self.handle("synchronize", containers=(), pods=())

    def handle(
        self, point: str, annotations: dict[str, str] | None = None, **fields: Any
    ) -> testing.Adjustment:
        event = testing.event(point, **fields)
        if hasattr(event, "pod") and "pod" not in fields:
            pod = changed_copy(samples.POD, annotations=annotations or {})
            event = changed_copy(event, pod=pod)
        return testing.run(self.hook, event).adjustment

    def create_and_start(self, annotations: dict[str, str]) -> testing.Adjustment:
        """Send the events of a create and a start."""
        answer = self.handle("pre_create_container", annotations, decision=OWN, container=testing.container())
        there = {"decision": OWN, "container": CONTAINER}
        for point in ("post_create_container", "pre_start_container", "post_start_container"):
            self.handle(point, annotations, **there)
        return answer

    def __getitem__(self, path: str) -> str:
        return (self.root / path).read_text().strip()

    @property
    def irq(self) -> str:
        return self["proc/irq/9/smp_affinity_list"]

    def cpu(self, number: int) -> tuple[str, str]:
        directory = f"sys/devices/system/cpu/cpu{number}"
        return self[f"{directory}/power/pm_qos_resume_latency_us"], self[
            f"{directory}/cpufreq/scaling_governor"
        ]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr(
        log, "say_once", lambda key, level, text, **context: messages.append(str(context["err"]))
    )
    return messages


def test_without_annotations_nothing_is_changed(node: Node, reported: list[str]) -> None:
    assert node.create_and_start({}) == testing.NOTHING
    assert node[f"cgroup/cpu/kubepods/pod{UID}/cpu.cfs_quota_us"] == "400000"
    assert (node.irq, node.cpu(2)) == ("0-15", ("0", "powersave"))
    assert reported == []


def test_the_quota_of_container_and_pod_is_removed(node: Node) -> None:
    off = {"cpu-quota.crio.io": "disable"}
    assert node.create_and_start(off) == testing.Adjustment(cpu_quota=-1)
    assert node[f"cgroup/cpu/kubepods/pod{UID}/cpu.cfs_quota_us"] == "-1"
    update = Resources(cpu_quota=100_000)
    assert node.handle("pre_update_container_resources", off, decision=OWN, asked=update).cpu_quota == -1
    assert not node.handle(
        "pre_update_container_resources", off, decision=OWN, asked=Resources(memory_limit=1)
    )
    assert not node.handle("pre_update_container_resources", {}, decision=OWN, asked=update)


def test_interrupts_are_moved_off_all_cpus_of_the_container(node: Node, reported: list[str]) -> None:
    off = {"irq-load-balancing.crio.io": "disable"}
    assert node.create_and_start(off) == testing.NOTHING
    assert node.irq == "0-1,6-15"
    update = Resources(cpu_quota=100_000)
    assert not node.handle("pre_update_container_resources", off, decision=OWN, asked=update)
    assert node[f"cgroup/cpuset/kubepods/pod{UID}/c1/cpuset.sched_load_balance"] == "1"
    assert reported == []
    node.handle("post_stop_container", decision=OWN, container=CONTAINER)
    assert node.irq == "0-15"


def test_interrupts_stay_on_the_first_core_for_housekeeping(node: Node) -> None:
    answer = node.create_and_start({"irq-load-balancing.crio.io": "housekeeping"})
    assert answer.envs == {"OPENSHIFT_HOUSEKEEPING_CPUS": "2-3"}
    assert node.irq == "0-3,6-15"
    mine = testing.container(envs={"OPENSHIFT_HOUSEKEEPING_CPUS": "x"})
    keys = {"irq-load-balancing.crio.io": "housekeeping"}
    assert not node.handle("pre_create_container", keys, decision=OWN, container=mine)
    odd_cpus = testing.decision("own", "3-5")
    envs = node.handle("pre_create_container", keys, decision=odd_cpus, container=testing.container()).envs
    assert envs == {"OPENSHIFT_HOUSEKEEPING_CPUS": "3"}, "only threads that the container owns"


def test_idle_latency_and_frequency_governor_are_set(node: Node) -> None:
    node.create_and_start(
        {"cpu-c-states.crio.io": "max_latency:10", "cpu-freq-governor.crio.io": "performance"}
    )
    assert [node.cpu(n) for n in (1, 2, 5, 6)] == [
        ("0", "powersave"), ("10", "performance"), ("10", "performance"), ("0", "powersave"),
    ]  # fmt: skip
    node.handle("post_remove_container", container=CONTAINER)
    assert node.cpu(2) == ("0", "powersave")


def test_load_balancing_on_v1_reports_an_ancestor_that_undoes_it(node: Node, reported: list[str]) -> None:
    node.create_and_start({"cpu-load-balancing.crio.io": "disable"})
    assert node[f"cgroup/cpuset/kubepods/pod{UID}/c1/cpuset.sched_load_balance"] == "0"
    assert len(reported) == 1
    assert "has no effect" in reported[0]
    assert reported[0].endswith("groups above, /")


def test_load_balancing_on_v2_is_left_to_the_engine(node: Node, reported: list[str]) -> None:
    (node.root / "cgroup/cgroup.controllers").write_text("cpuset")
    node.create_and_start({"cpu-load-balancing.crio.io": "disable"})
    assert "apply.partitions: isolated" in reported[0]


def test_settings_without_effect_are_reported(node: Node, reported: list[str]) -> None:
    node.create_and_start({"cpu-quota.crio.io": "maybe", "cpu-shared.crio.io/main": "enable"})
    assert any("'maybe'" in text for text in reported)
    assert any("cannot add CPUs" in text for text in reported)
    node.create_and_start({"cpu-freq-governor.crio.io": "warp", "irq-load-balancing.crio.io": "disable"})
    assert any("governor warp" in text for text in reported)
    assert node.irq == "0-1,6-15", "other settings are applied"


def test_only_owners_of_chosen_runtime_classes_are_changed(tmp_path: Path) -> None:
    keys = {"cpu-quota.crio.io": "disable"}
    node = Node(tmp_path, handlers=["performance"])
    assert not node.create_and_start(keys)
    pod = changed_copy(samples.POD, runtime_handler="performance", annotations=keys)
    assert node.handle("pre_create_container", pod=pod, decision=OWN).cpu_quota == -1
    assert not node.handle("pre_create_container", pod=pod, decision=testing.decision("shared"))


@pytest.mark.parametrize(("reason", "restored"), [("stop", True), ("removed", True), ("replaced", False)])
def test_all_settings_are_restored_at_the_shutdown(node: Node, reason: str, restored: bool) -> None:
    node.create_and_start({"irq-load-balancing.crio.io": "disable", "cpu-c-states.crio.io": "disable"})
    testing.run(node.hook, Shutdown(reason))
    assert (node.irq == "0-15") is restored
    assert (node.cpu(2)[0] == "0") is restored


def test_the_two_hooks_for_interrupts_do_not_conflict(node: Node) -> None:
    path = HOOK.with_name("40-irq-affinity.py")
    names = {"proc": str(node.root / "proc"), "state": str(node.root / "irqs.json")}
    all_owners = testing.load(path, names)
    testing.run(all_owners, testing.event("synchronize", containers=(testing.running("c0", decision=OWN),)))
    node.create_and_start({"irq-load-balancing.crio.io": "disable"})
    testing.run(all_owners, Shutdown("removed"))
    assert node.irq == "0-1,6-15"
    node.handle("post_stop_container", container=CONTAINER)
    assert node.irq == "0-15"
