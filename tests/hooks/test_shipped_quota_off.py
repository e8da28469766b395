"""The shipped hook 20-quota-off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.hooks import testing
from proxy.hooks.facts import Resources

HOOK = Path(__file__).resolve().parents[2] / "hooks/20-quota-off.py"
UID = "0f9a3c52-6f0f-4c43-9d0e-3f6d5a1c7e11"
OFF = testing.Adjustment(cpu_quota=-1)
KEEPS = testing.decision("own", unlimited=False)
"""The decision for an owner that keeps its quota: keepCFSQuota is always."""


def event(point: str, **fields: Any) -> Any:
    return testing.event(point, **{"decision": KEEPS, **fields})


def adjustment_of_create(config: dict[str, Any] | None = None, **fields: Any) -> testing.Adjustment:
    return testing.run(testing.load(HOOK, config), event("pre_create_container", **fields)).adjustment


def test_owners_are_created_without_a_quota() -> None:
    assert adjustment_of_create() == OFF
    assert adjustment_of_create(pod=testing.pod(qos="", kube_qos="Guaranteed")) == OFF


@pytest.mark.parametrize(
    "fields",
    [
        {"decision": testing.decision("shared")},
        {"decision": testing.decision("own", unlimited=True)},
        {"pod": testing.pod(qos="", kube_qos="Burstable")},
        {"container": testing.container(resources={"cpu_quota": -1})},
        {"container": testing.container(resources={"cpu_quota": 0})},
    ],
)
def test_other_containers_are_not_changed(fields: dict[str, Any]) -> None:
    assert adjustment_of_create(**fields) == testing.NOTHING


def test_only_chosen_classes_and_pods_with_the_annotation() -> None:
    classes = {"classes": ["LSE"]}
    assert adjustment_of_create(classes) == testing.NOTHING
    assert adjustment_of_create(classes, pod=testing.pod(qos="LSE")) == OFF
    assert adjustment_of_create({"classes": []}, pod=testing.pod(qos="LS")) == OFF
    by_value = {"annotation": "example.com/quota=off"}
    assert adjustment_of_create(by_value) == testing.NOTHING
    assert (
        adjustment_of_create(by_value, pod=testing.pod(annotations={"example.com/quota": "on"}))
        == testing.NOTHING
    )
    assert adjustment_of_create(by_value, pod=testing.pod(annotations={"example.com/quota": "off"})) == OFF
    assert adjustment_of_create({"annotation": "a"}, pod=testing.pod(annotations={"a": ""})) == OFF


def test_an_update_of_kubelet_does_not_restore_the_quota() -> None:
    hook = testing.load(HOOK)
    update = event("pre_update_container_resources", asked=Resources(cpu_quota=200_000))
    assert testing.run(hook, update).adjustment == OFF
    memory = event("pre_update_container_resources", asked=Resources(memory_limit=1 << 30))
    assert testing.run(hook, memory).adjustment == testing.NOTHING


@pytest.fixture
def quota(tmp_path: Path) -> Path:
    group = tmp_path / "cpu/kubepods" / f"pod{UID}"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("400000\n")
    return group / "cpu.cfs_quota_us"


@pytest.mark.parametrize("point", ["pre_start_container", "post_update_container_resources"])
def test_the_pods_quota_is_removed_before_starts_and_after_updates(
    tmp_path: Path, quota: Path, point: str
) -> None:
    root = {"cgroup_root": str(tmp_path)}
    shared = event(point, decision=testing.decision("shared"))
    testing.run(testing.load(HOOK, root), shared)
    testing.run(testing.load(HOOK, {**root, "pod": False}), event(point))
    assert quota.read_text() == "400000\n"
    testing.run(testing.load(HOOK, root), event(point))
    assert quota.read_text() == "-1\n"


def test_a_cgroup_that_cannot_be_written_does_not_fail_the_call(tmp_path: Path) -> None:
    hook = testing.load(HOOK, {"cgroup_root": str(tmp_path / "nowhere")})
    assert testing.run(hook, event("pre_start_container")) == testing.Outcome()
