"""Finding groups: at the expected path, next to it, and elsewhere in the tree."""

from collections.abc import Sequence

import pytest

from proxy.backends.cgroup.search import GroupFinder

ID = "0123456789abcdef"


class Tree:
    """Groups by name; counts the groups that are listed."""

    def __init__(self, *paths: str) -> None:
        self.groups = {""}
        for path in paths:
            parts = path.split("/")
            self.groups.update("/".join(parts[: i + 1]) for i in range(len(parts)))
        self.listed = 0

    def read(self, path: str, name: str) -> str:
        raise AssertionError("finding reads no files")

    def write(self, path: str, name: str, text: str) -> None:
        raise AssertionError("finding writes no files")

    def is_group(self, path: str) -> bool:
        return path in self.groups

    def children(self, path: str) -> Sequence[str]:
        self.listed += 1
        start = f"{path}/" if path else ""
        names = (g[len(start) :] for g in self.groups if g and g.startswith(start))
        return sorted(n for n in names if n and "/" not in n)


@pytest.mark.parametrize(
    ("parent", "place"),
    [
        ("/kubepods/podx", f"kubepods/podx/{ID}"),
        ("kubepods-podx.slice", f"kubepods.slice/kubepods-podx.slice/cri-containerd-{ID}.scope"),
        ("kubepods-podx.slice", f"kubepods.slice/kubepods-podx.slice/crio-{ID}.scope"),
        ("", f"k8s.io/{ID}"),
        ("", ID),
    ],
)
def test_expected_places_need_no_search(parent: str, place: str) -> None:
    tree = Tree(place, "other/thing")
    assert GroupFinder(tree).find(parent, ID) == place
    assert tree.listed == 0


def test_an_unknown_prefix_is_found_in_the_pods_group() -> None:
    tree = Tree(f"kubepods.slice/kubepods-podx.slice/pouch-{ID}.scope")
    assert (
        GroupFinder(tree).find("kubepods-podx.slice", ID)
        == f"kubepods.slice/kubepods-podx.slice/pouch-{ID}.scope"
    )
    assert tree.listed == 1


def test_a_container_that_was_not_started_costs_no_search() -> None:
    tree = Tree("kubepods/podx/pause", *(f"many/{i}" for i in range(50)))
    assert GroupFinder(tree).find("/kubepods/podx", ID) is None
    assert tree.listed == 1


def test_a_cgroup_root_is_searched_once_and_remembered() -> None:
    place = f"kubelet/kubepods/podx/{ID}"
    tree = Tree(place, "system/a/b", "user")
    finder = GroupFinder(tree)
    assert finder.find("/kubepods/podx", ID) == place
    listed = tree.listed
    assert finder.find("/kubepods/podx", ID) == place
    assert tree.listed == listed
    tree.groups.discard(place)
    assert finder.find("/kubepods/podx", ID) is None


@pytest.mark.parametrize("learned", [False, True])
def test_the_levels_above_are_searched_once(learned: bool) -> None:
    top = "docker/node/kubelet"
    pods = [f"{top}/kubepods/pod{n}/{ID}{n}" for n in range(3)]
    slices = f"{top}/kubepods.slice/kubepods-podx.slice/crio-{ID}x.scope"
    tree = Tree(*pods, slices, *(f"many/{i}" for i in range(50)))
    finder = GroupFinder(tree)
    if learned:
        finder.remember(f"{ID}0", pods[0], f"/kubepods/pod0/{ID}0")
    else:
        assert finder.find("/kubepods/pod0", f"{ID}0") == pods[0]
    listed = tree.listed
    assert [finder.find(f"/kubepods/pod{n}", f"{ID}{n}") for n in range(3)] == pods
    assert finder.find("kubepods-podx.slice", f"{ID}x") == slices
    assert tree.listed == listed
    assert finder.find("/kubepods/pod1", "other") is None
    assert tree.listed == listed + 1, "the pod exists, so only its group is listed"
    assert finder.find_path("kubepods/pod1") == f"{top}/kubepods/pod1"
    assert finder.find_path("kubepods/pod9") is None


def test_levels_found_for_another_tree_or_name_are_not_kept() -> None:
    tree = Tree("a/b/kubepods/podx", "c/odd")
    finder = GroupFinder(tree)
    finder.remember(ID, "gone/kubepods/podx", "/kubepods")
    finder.remember(ID, "c/odd", "/kubepods/podx")
    assert finder.find_path("kubepods/podx") is None
    assert finder.find("/kubepods/podx", ID) == "c/odd"


def test_the_search_is_bounded() -> None:
    tree = Tree(*(f"a{i}" for i in range(30)), f"z/{ID}")
    assert GroupFinder(tree, limit=20).find("/kubepods/podx", ID) is None
    assert tree.listed == 20
    assert GroupFinder(tree, limit=40).find("/kubepods/podx", ID) == f"z/{ID}"


@pytest.mark.parametrize("bad", ["", "..", "a/b", "."])
def test_an_invalid_id_is_not_searched_for(bad: str) -> None:
    tree = Tree("kubepods/podx/a/b")
    assert GroupFinder(tree).find("/kubepods/podx", bad) is None
    assert tree.listed == 0
