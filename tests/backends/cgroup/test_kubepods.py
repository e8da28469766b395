from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.backends.cgroup.group_names import CgroupDriver, expand_slice, pod_uid
from proxy.model.errors import CgroupError
from proxy.model.workload import KubeQos
from proxy.pools.facts import kube_qos
from tests.oracles.kubepods import (
    RUNTIMES,
    class_path,
    container_id,
    container_name,
    container_path,
    driver_of,
    pod_path,
)

SYSTEMD, CGROUPFS = CgroupDriver.SYSTEMD, CgroupDriver.CGROUPFS
UID = st.uuids().map(str)


def test_only_the_two_known_drivers_are_read() -> None:
    assert (driver_of("systemd"), driver_of("cgroupfs"), driver_of("Systemd")) == (SYSTEMD, CGROUPFS, None)


def test_each_qos_class_has_its_path_under_each_driver() -> None:
    assert class_path(SYSTEMD) == class_path(SYSTEMD, KubeQos.GUARANTEED) == "kubepods.slice"
    assert class_path(CGROUPFS, KubeQos.BEST_EFFORT) == "kubepods/besteffort"
    assert class_path(SYSTEMD, KubeQos.BURSTABLE) == "kubepods.slice/kubepods-burstable.slice"


@given(st.sampled_from(CgroupDriver), st.sampled_from(KubeQos), UID)
def test_a_pods_name_gives_its_uid_and_class(driver: CgroupDriver, qos: KubeQos, uid: str) -> None:
    path = pod_path(driver, qos, uid)
    assert path.startswith(class_path(driver, qos) + "/")
    assert pod_uid(driver, path.rpartition("/")[2]) == uid
    assert kube_qos(path) is qos
    if driver is SYSTEMD:
        assert expand_slice(path.rpartition("/")[2]) == path, "systemd makes the same of the name"


@pytest.mark.parametrize(
    "name",
    [
        "kubelet-kubepods-pod1_2.slice",
        "a-b-kubepods-burstable-pod1_2.slice",
        "kubepods-besteffort-pod1_2.slice",
    ],
)
def test_slices_below_a_cgroup_root_of_kubelet_are_those_of_pods(name: str) -> None:
    assert pod_uid(SYSTEMD, name) == "1-2"


@given(
    st.sampled_from(CgroupDriver), st.sampled_from(sorted(RUNTIMES)), st.text("0123456789abcdef", min_size=1)
)
def test_a_containers_name_gives_its_id(driver: CgroupDriver, runtime: str, own: str) -> None:
    reported, name = container_name(driver, f"{runtime}://{own}")
    assert (reported, container_id(driver, name)) == (runtime, own)
    assert container_path(driver, "a/b/", f"{runtime}://{own}") == f"a/b/{name}"
    assert container_path(driver, "", f"{runtime}://{own}") == name


def test_cri_o_makes_groups_without_a_suffix_too() -> None:
    assert container_id(SYSTEMD, "crio-1f") == "1f"


@pytest.mark.parametrize("name", ["1f", "crio-conmon-1f.scope", "cri-containerd-1f", "x-1f.scope", ""])
def test_names_that_are_not_containers(name: str) -> None:
    with pytest.raises(CgroupError, match="this is no container's"):
        container_id(SYSTEMD, name)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        (SYSTEMD, "kubepods-pod.slice"),
        (SYSTEMD, "pod1"),
        (SYSTEMD, "kubepods-pod1"),
        (SYSTEMD, "kubepods-pod1-x.slice"),
        (SYSTEMD, "mykubepods-pod1.slice"),
        (CGROUPFS, "pod"),
        (CGROUPFS, "besteffort"),
    ],
)
def test_names_that_are_not_pods(driver: CgroupDriver, name: str) -> None:
    with pytest.raises(CgroupError, match="this is not a pod's"):
        pod_uid(driver, name)


@pytest.mark.parametrize("text", ["1f", "crio://1f", "containerd://", "containerd://a/b", "containerd://.."])
def test_ids_that_name_no_container(text: str) -> None:
    with pytest.raises(CgroupError, match="cannot name the cgroup of container"):
        container_name(SYSTEMD, text)


@pytest.mark.parametrize("uid", ["", "..", "a/b"])
def test_uids_that_are_not_names(uid: str) -> None:
    with pytest.raises(CgroupError, match="this is no uid"):
        pod_path(CGROUPFS, KubeQos.BURSTABLE, uid)
