"""The shipped hook 30-cpus-file, with real files."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.hooks import testing
from proxy.hooks.facts import Mount, PodFacts, Pools
from proxy.hooks.samples import existing
from proxy.model.errors import HookError
from proxy.model.idset import CpuSet
from tests.testkit.changed_copy import changed_copy

HOOK = Path(__file__).resolve().parents[2] / "hooks/30-cpus-file.py"
POD = testing.pod(uid="uid-1")
DIRECTORY = "uid-1/main.0"


def cpus(text: str) -> CpuSet:
    return CpuSet.parse(text)


class Node:
    """The hook with its files in a directory."""

    def __init__(self, root: Path, config: dict[str, Any]) -> None:
        self.root = root
        self.hook = testing.load(HOOK, {"root": str(root), **config})

    def handle(self, point: str, **fields: Any) -> testing.Adjustment:
        return testing.run(self.hook, testing.event(point, **fields)).adjustment

    def create(
        self, name: str = "main", *, pod: PodFacts = POD, one: str = "c1", **decided: Any
    ) -> testing.Adjustment:
        decision = testing.decision(**decided)
        container = testing.container(name=name)
        answer = self.handle("pre_create_container", pod=pod, container=container, decision=decision)
        self.handle("post_create_container", pod=pod, container=existing(container, one), decision=decision)
        return answer

    def file(self, directory: str = DIRECTORY) -> dict[str, str]:
        lines = (self.root / directory / "cpus").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)


@pytest.fixture
def node(tmp_path: Path) -> Callable[..., Node]:
    return lambda **config: Node(tmp_path / "cpus", config)


def test_an_owner_gets_its_cpus_as_variable_and_as_file(node: Callable[..., Node]) -> None:
    one = node()
    answer = one.create(pool="own", cpus="2-5", mems="0")
    reported = {"EXCLUSIVE_CPUS": "2-5", "SHARED_CPUS": "", "MEMORY_NODES": "0"}
    assert answer.envs == reported == one.file()
    host = str(one.root / DIRECTORY)
    assert answer.mounts == {"/run/topoproxy": Mount("/run/topoproxy", host, readonly=True)}


def test_a_repeated_create_uses_the_same_directory(node: Callable[..., Node]) -> None:
    one = node()
    first = one.handle("pre_create_container", pod=POD, decision=testing.decision("own", "2-5"))
    again = one.handle("pre_create_container", pod=POD, decision=testing.decision("own", "6-7"))
    assert first.mounts == again.mounts
    assert one.file()["EXCLUSIVE_CPUS"] == "6-7"


def test_the_file_is_readable_for_every_program_and_a_shell(node: Callable[..., Node]) -> None:
    before = os.umask(0o077)
    try:
        one = node()
        one.create(pool="own", cpus="2-5")
    finally:
        os.umask(before)
    file = one.root / DIRECTORY / "cpus"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o644, 0o755)
    script = f". {file}; echo $EXCLUSIVE_CPUS"
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == "2-5\n"


def test_the_reported_hook_is_a_setting(node: Callable[..., Node]) -> None:
    shared: dict[str, Any] = {"pool": "shared", "cpus": "0-1"}
    assert not node().create(**shared)
    assert node(which="all").create(**shared).envs["SHARED_CPUS"] == "0-1"
    some = node(which="annotated", annotation="a=b")
    assert not some.create(pool="own")
    assert some.create(pod=testing.pod(uid="x", annotations={"a": "b"}), **shared).envs
    assert not some.create(pod=testing.pod(uid="x", annotations={"a": "c"}), **shared)
    assert node(which="annotated", annotation="a").create(pod=testing.pod(annotations={"a": ""}), **shared)


def test_variables_and_mounts_of_the_container_are_kept(node: Callable[..., Node]) -> None:
    container = testing.container(
        envs={"SHARED_CPUS": "mine"}, mounts=(Mount("/run/topoproxy/", "/elsewhere"),)
    )
    one = node()
    answer = one.handle("pre_create_container", pod=POD, container=container)
    assert set(answer.envs) == {"EXCLUSIVE_CPUS", "MEMORY_NODES"}
    assert answer.mounts == {}
    assert not one.root.exists()


def test_the_names_of_variables_and_mounts_are_settings(node: Callable[..., Node]) -> None:
    answer = node(exclusive="OWN", shared="", memory="", mount="/etc/cpus").create(pool="own", cpus="1")
    assert answer.envs == {"OWN": "1"}
    assert list(answer.mounts) == ["/etc/cpus"]
    assert node(mount="").create(pool="own").mounts == {}
    assert node(env=False).create(pool="own").envs == {}
    for wrong in ({"exclusive": "a b"}, {"mount": "x"}, {"root": "/a/../b"}, {"root": ""}, {"mount": "/"}):
        with pytest.raises(HookError, match=r"hooks\.settings\.30-cpus-file\.config"):
            node(**wrong)


def test_the_file_follows_the_pools(node: Callable[..., Node]) -> None:
    one = node(which="all")
    pools = Pools(shared=cpus("0-7"), be=cpus("4-7"))
    one.handle("synchronize", containers=(), pods=(), pools=pools)
    one.create("whole", one="c1", pool="shared", cpus="0-7")
    one.create("part", one="c2", pool="shared", cpus="0-3")
    one.create("batch", one="c3", pool="be", cpus="4-7")
    one.create("owner", one="c4", pool="own", cpus="2-3")
    after = Pools(shared=cpus("0-1,4-7"), be=cpus("4-6"), owned=cpus("2-3"), owners={"c4": cpus("2,6")})
    one.handle("pools_changed", before=pools, after=after)
    assert one.file("uid-1/whole.0")["SHARED_CPUS"] == "0-1,4-7"
    assert one.file("uid-1/part.0")["SHARED_CPUS"] == "0-1"
    assert one.file("uid-1/batch.0")["SHARED_CPUS"] == "4-6"
    assert one.file("uid-1/owner.0")["EXCLUSIVE_CPUS"] == "2,6"
    one.handle("pools_changed", before=after, after=pools)
    assert one.file("uid-1/part.0")["SHARED_CPUS"] == "0-3"


def test_a_reader_never_reads_a_partial_file(node: Callable[..., Node]) -> None:
    one = node()
    one.create(pool="own", cpus="2-5")
    directory = one.root / DIRECTORY
    with (directory / "cpus").open() as opened:
        one.handle(
            "post_start_container",
            pod=POD,
            container=existing(container_id="c1"),
            decision=testing.decision("own", "6"),
        )
        one.handle(
            "post_update_container_resources",
            pod=POD,
            container=existing(testing.container(), "c1"),
            decision=testing.decision("own", "6-7"),
        )
        assert "2-5" in opened.read(), "a reader with the file open reads its former content"
    assert one.file()["EXCLUSIVE_CPUS"] == "6-7"
    assert [path.name for path in directory.iterdir()] == ["cpus"]


def test_a_link_in_the_directory_is_not_followed(node: Callable[..., Node], tmp_path: Path) -> None:
    one = node()
    one.create(pool="own", cpus="2-5")
    victim = tmp_path / "victim"
    victim.write_text("whole")
    for name in ("cpus", ".cpus.new"):
        (one.root / DIRECTORY / name).unlink(missing_ok=True)
        (one.root / DIRECTORY / name).symlink_to(victim)
    changed = {"container": existing(testing.container(), "c1"), "decision": testing.decision("own", "7")}
    one.handle("post_start_container", pod=POD, **changed)
    assert victim.read_text() == "whole"
    assert one.file()["EXCLUSIVE_CPUS"] == "7"


def test_containers_of_a_pod_get_the_cpus_of_each_other(node: Callable[..., Node]) -> None:
    one = node(peers=True)
    one.create("main", one="c1", pool="own", cpus="2-3")
    answer = one.create("side-car.1", one="c2", pool="own", cpus="4")
    assert answer.envs["PEER_CPUS_MAIN"] == "2-3"
    assert one.file()["PEER_CPUS_SIDE_CAR_1"] == "4"
    one.create("else", pod=testing.pod(uid="uid-2"), one="c3", pool="own", cpus="6")
    assert not [name for name in one.file() if name.endswith("ELSE")], "not of other pods"
    gone = existing(testing.container(name="side-car.1"), "c2")
    one.handle("post_stop_container", pod=POD, container=gone)
    assert "PEER_CPUS_SIDE_CAR_1" not in one.file()
    assert "PEER_CPUS_SIDE_CAR_1" not in node().create("x", one="c9", pool="own").envs


def test_the_directory_is_removed_with_the_container_and_the_pod(node: Callable[..., Node]) -> None:
    one = node()
    one.create("main", one="c1", pool="own")
    one.create("other", one="c2", pool="own")
    one.handle("post_remove_container", pod=POD, container=existing(testing.container(name="main"), "c1"))
    assert [path.name for path in (one.root / "uid-1").iterdir()] == ["other.0"]
    one.handle("post_remove_container", pod=POD, container=existing(testing.container(name="other"), "c2"))
    assert list(one.root.iterdir()) == []
    one.handle("pre_create_container", pod=POD)  # the create fails afterwards
    os.utime(one.root / DIRECTORY, (0, 0))
    one.handle("post_remove_pod_sandbox", pod=POD)
    assert list(one.root.iterdir()) == []


def test_the_removal_of_an_old_sandbox_keeps_the_directory_of_a_create_in_the_new_one(
    node: Callable[..., Node],
) -> None:
    if HOOK.parent.name != "hooks":
        pytest.skip("the earlier version of the hook removes it")
    one = node()
    (one.root / "uid-1/failed.0").mkdir(parents=True)
    os.utime(one.root / "uid-1/failed.0", (0, 0))
    one.handle("pre_create_container", pod=POD, decision=testing.decision("own", "2-5"))
    one.handle("post_remove_pod_sandbox", pod=testing.pod(uid="uid-1", sandbox_id="old"))
    assert [path.name for path in (one.root / "uid-1").iterdir()] == ["main.0"]
    assert one.file()["EXCLUSIVE_CPUS"] == "2-5"


def test_a_start_removes_stale_directories_and_corrects_files(node: Callable[..., Node]) -> None:
    one = node()
    one.create("main", one="c1", pool="own", cpus="2-3")
    for name in ("uid-1/old.0", "gone/main.3", "gone/fresh.0"):
        (one.root / name).mkdir(parents=True)
        os.utime(one.root / name, (0, 0))
    os.utime(one.root / "gone/fresh.0")
    os.utime(one.root / DIRECTORY, (0, 0))
    again = node()
    existing_container = testing.running(
        "c1", pod=POD, container=existing(), decision=testing.decision("own", "4-5")
    )
    again.handle("synchronize", containers=(existing_container,))
    found = sorted(str(path.relative_to(one.root)) for path in one.root.glob("*/*"))
    assert found == ["gone/fresh.0", DIRECTORY], "a new directory may belong to a pending create"
    assert again.file()["EXCLUSIVE_CPUS"] == "4-5"


def test_a_container_that_never_had_the_directory_gets_none(node: Callable[..., Node]) -> None:
    one = node()
    one.handle("synchronize", containers=(testing.running("c1", pod=POD),))
    one.handle("post_start_container", pod=POD, container=existing(), decision=testing.decision("own", "7"))
    assert not one.root.exists()


@pytest.mark.parametrize(
    ("uid", "name"), [("..", "main"), ("a/b", "main"), ("", "main"), ("u", "../x"), ("u", "")]
)
def test_names_that_are_not_directories_get_variables_only(
    node: Callable[..., Node], uid: str, name: str
) -> None:
    one = node()
    answer = one.create(name, pod=testing.pod(uid=uid), pool="own", cpus="2")
    assert answer.envs["EXCLUSIVE_CPUS"] == "2"
    assert answer.mounts == {}
    one.handle("post_remove_pod_sandbox", pod=testing.pod(uid=uid))
    assert one.root.parent.exists()
    assert not one.root.exists()


def test_pods_without_a_uid_are_not_one_pod(node: Callable[..., Node]) -> None:
    one = node(peers=True)
    nameless = testing.pod(uid="")
    one.create("a", pod=nameless, one="c1", pool="own", cpus="1")
    assert "PEER_CPUS_A" not in one.create("b", pod=changed_copy(nameless), one="c2", pool="own").envs
