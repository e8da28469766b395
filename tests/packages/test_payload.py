"""What goes into the packages: for the right machine, complete, and the same for each kind."""

from __future__ import annotations

import posixpath
import re

import payload
import pytest
from tree import Entry, Tree, tar, with_directories


def elf(machine: int) -> Entry:
    return Entry(b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little"))


def test_modules_for_another_machine_are_refused() -> None:
    payload._check_machine({"a.so": elf(62), "b.py": Entry(b"")}, "amd64")
    payload._check_machine({"a.so": elf(183)}, "arm64")
    for site, arch in (({"a.so": elf(62)}, "arm64"), ({"a.so": elf(62), "b.so": elf(183)}, "amd64")):
        with pytest.raises(ValueError, match=f"cannot package for {arch}"):
            payload._check_machine(site, arch)
    with pytest.raises(ValueError, match="no compiled module"):
        payload._check_machine({"b.py": Entry(b"")}, "amd64")


def test_an_archive_does_not_depend_on_the_order() -> None:
    one: Tree = {"b/x": Entry(b"1"), "a": Entry(link="b/x"), "c": Entry(b"2", mode=0o755)}
    assert tar(one, 5) == tar(dict(reversed(one.items())), 5)
    assert list(with_directories(one)) == ["a", "b", "b/x", "c"]
    assert tar(one, 5) != tar(one, 6)


def test_deb_and_rpm_differ_only_in_two_places() -> None:
    deb, rpm = payload.node_files("deb", 0), payload.node_files("rpm", 0)
    assert deb.keys() - rpm.keys() == {
        "usr/share/zsh/vendor-completions/_topoproxy",
        f"{payload.DOC}/copyright",
    }
    both = {"usr/share/zsh/site-functions/_topoproxy", "usr/share/licenses/topoproxy/LICENSE"}
    assert rpm.keys() - deb.keys() == both
    assert all(deb[name] == rpm[name] for name in deb.keys() & rpm.keys())


@pytest.mark.parametrize("kind", ["deb", "rpm"])
def test_every_relative_link_of_a_packaged_page_leads_to_a_packaged_file(kind: str) -> None:
    tree = payload.node_files(kind, 0)
    links = [
        (path, posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
        for path, entry in tree.items()
        if path.endswith(".md") and entry.data
        for target in re.findall(r"\]\(([^)\s#]+)", entry.data.decode())
        if not target.startswith(("http://", "https://"))
    ]
    assert len(links) > 100
    packaged = with_directories(tree)
    assert [(path, target) for path, target in links if target not in packaged] == []


def test_files_that_messages_and_pages_name_are_at_these_paths_of_the_documentation() -> None:
    tree = payload.node_files("deb", 0)
    for name in (
        "systemd/examples/topoproxy.service.d/20-takeover.conf",
        "systemd/examples/topoproxy.service.d/30-irq-affinity.conf",
        "deploy/agent/kustomization.yaml",
        "deploy/helm/topoproxy-agent/Chart.yaml",
    ):
        assert f"{payload.DOC}/{name}" in tree
