"""CRI-O's groups: those of sandboxes, containers and monitors."""

from __future__ import annotations

import pytest

from proxy.backends.cgroup.group_names import candidates, is_name_of_container
from proxy.backends.runtime.quirks import QUIRKS, crio


@pytest.mark.parametrize(
    ("group", "is_crio", "left_behind"),
    [
        ("kubepods/pod1/crio-s1", True, True),
        ("kubepods.slice/pod1.slice/crio-s1", True, True),
        ("kubepods.slice/pod1.slice/crio-s1.scope", True, False),
        ("kubepods.slice/pod1.slice/cri-containerd-s1.scope", False, False),
        ("kubepods/crio-pod/s1", False, False),
        ("crio-s1", True, True),
    ],
)
def test_a_sandbox_of_crio_is_recognized_by_its_group_name(
    group: str, is_crio: bool, left_behind: bool
) -> None:
    assert (QUIRKS.has_monitors(group), QUIRKS.may_lose_controllers(group)) == (is_crio, left_behind)


@pytest.mark.parametrize("driver", ["/kubepods/pod1", "kubepods-pod1.slice"])
def test_a_monitor_is_found_by_its_name_and_is_not_the_container(driver: str) -> None:
    names = [path.rpartition("/")[2] for path in candidates(driver, crio.monitor("c1"))]
    assert "crio-conmon-c1" in names
    assert "crio-conmon-c1.scope" in names
    assert not any(is_name_of_container(name, "c1") for name in names if name.startswith(crio.MONITOR_GROUP))
    assert is_name_of_container("crio-c1.scope", "c1")
