"""The paths at which containerd creates the cgroups of containers."""

from __future__ import annotations

import pytest

from proxy.backends.cgroup.group_names import candidates, parent_of_container
from proxy.backends.runtime.quirks import containerd


@pytest.mark.parametrize("parent", ["pod1.slice", "/kubepods.slice/pod1.slice", "kubepods.slice/pod1.slice/"])
def test_runc_without_systemd_makes_a_directory_with_the_slices_name(parent: str) -> None:
    assert containerd.unexpanded(parent, "c1") == "pod1.slice:cri-containerd:c1"
    assert "pod1.slice:cri-containerd:c1" in candidates(parent, "c1")


def test_a_container_without_a_parent_is_in_the_namespace() -> None:
    assert parent_of_container("", "c1") == "k8s.io"
    assert next(candidates("", "c1")) == "k8s.io/c1"
