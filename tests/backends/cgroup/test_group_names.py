"""Cgroup paths of containers, by parent and id."""

import pytest

from proxy.backends.cgroup.group_names import (
    candidates,
    expand_slice,
    is_name_of_container,
    parent_of_container,
    parent_path,
)

ID = "4f1c9d"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("kubepods.slice", "kubepods.slice"),
        ("kubepods-burstable.slice", "kubepods.slice/kubepods-burstable.slice"),
        (
            "kubepods-besteffort-pod1_2.slice",
            "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1_2.slice",
        ),
        ("-.slice", ""),
        ("kubepods", None),
        ("a--b.slice", None),
        ("-a.slice", None),
        ("a/b.slice", None),
        (".slice", None),
        ("a.slice.d", None),
    ],
)
def test_a_slice_expands_to_its_path_and_invalid_names_do_not(name: str, path: str | None) -> None:
    assert expand_slice(name) == path


@pytest.mark.parametrize(
    ("parent", "path"),
    [
        ("/kubepods/burstable/podx", "kubepods/burstable/podx"),
        ("kubepods//podx/", "kubepods/podx"),
        ("kubepods-podx.slice", "kubepods.slice/kubepods-podx.slice"),
        ("/kubepods.slice/kubepods-podx.slice/", "kubepods.slice/kubepods-podx.slice"),
        ("/../etc", None),
        ("/a/./b", None),
        ("/a\0b", None),
        ("", None),
        ("/", ""),
    ],
)
def test_a_cgroup_parent_of_either_driver_becomes_a_path(parent: str, path: str | None) -> None:
    assert parent_path(parent) == path


@pytest.mark.parametrize(
    ("parent", "first"),
    [
        ("/kubepods/burstable/podx", f"kubepods/burstable/podx/{ID}"),
        ("kubepods-podx.slice", f"kubepods.slice/kubepods-podx.slice/cri-containerd-{ID}.scope"),
        ("", f"k8s.io/{ID}"),
        (f"/kubepods/podx/{ID}", f"kubepods/podx/{ID}"),
        (f"kubepods-podx.slice:other:{ID}", f"kubepods.slice/kubepods-podx.slice/other-{ID}.scope"),
        (f":crio:{ID}", f"system.slice/crio-{ID}.scope"),
        ("/", ID),
    ],
)
def test_the_most_likely_path_comes_first(parent: str, first: str) -> None:
    assert next(candidates(parent, ID)) == first


@pytest.mark.parametrize(
    ("parent", "expected"),
    [
        ("kubepods-podx.slice", f"kubepods.slice/kubepods-podx.slice/crio-{ID}.scope"),
        ("kubepods-podx.slice", f"kubepods.slice/kubepods-podx.slice/docker-{ID}.scope"),
        ("/kubepods/podx", f"kubepods/podx/crio-{ID}"),
        ("kubepods-podx.slice", f"kubepods-podx.slice:cri-containerd:{ID}"),
        (f"kubepods-podx.slice:cri-containerd:{ID}", f"kubepods-podx.slice:cri-containerd:{ID}"),
        ("", ID),
        ("", f"system.slice/cri-containerd-{ID}.scope"),
    ],
)
def test_names_of_other_runtimes_are_among_the_candidates(parent: str, expected: str) -> None:
    assert expected in list(candidates(parent, ID))


@pytest.mark.parametrize("parent", ["/../x", f"/../x/{ID}", f"a/../b.slice:p:{ID}", f"a.slice:../p:{ID}"])
def test_no_place_is_outside_the_tree(parent: str) -> None:
    assert not [path for path in candidates(parent, ID) if ".." in path.split("/")]


def test_home_is_where_the_pod_is() -> None:
    assert parent_of_container("/kubepods/podx", ID) == "kubepods/podx"
    assert parent_of_container(f"/kubepods/podx/{ID}", ID) == "kubepods/podx"
    assert parent_of_container(f"kubepods-podx.slice:p:{ID}", ID) == "kubepods.slice/kubepods-podx.slice"
    assert parent_of_container("", ID) == "k8s.io"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        (ID, True),
        (f"cri-containerd-{ID}.scope", True),
        (f"pouch-{ID}", True),
        (f"a.slice:other:{ID}", True),
        (f"crio-conmon-{ID}.scope", False),
        (f"x{ID}", False),
        (f"{ID}-x", False),
        (f"{ID[:-1]}", False),
    ],
)
def test_only_the_containers_own_group_holds_its_id(name: str, answer: bool) -> None:
    assert is_name_of_container(name, ID) is answer
