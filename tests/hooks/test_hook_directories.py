"""Which files are hooks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from proxy.config.hooks import HooksConfig
from proxy.hooks.loader.directories import Survey, survey


class Folders:
    """The three folders; the first lookup finds them absent."""

    def __init__(self, root: Path) -> None:
        self.etc, self.usr, self.servers = root / "etc", root / "usr", root / "servers"
        self.config = HooksConfig(
            directory=self.etc, vendor_directory=self.usr, server_directory=self.servers
        )

    def make(self) -> Folders:
        for folder in (self.etc, self.usr, self.servers):
            folder.mkdir(mode=0o755)
        return self

    def look(self) -> Survey:
        return survey(self.config)

    def taken(self) -> dict[str, str]:
        return {name: str(c.path.parent.name) for name, c in self.look().candidates.items()}


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path).make()


def test_absent_directories_are_fine(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    assert folders.look() == Survey()
    (tmp_path / "etc").write_text("no folder")
    assert folders.look() == Survey(strange=[f"cannot look for hooks in {folders.etc}: Not a directory"])


def test_a_directory_that_is_a_file_is_reported(folders: Folders) -> None:
    folders.usr.rmdir()
    folders.usr.touch()
    (folders.etc / "10-a.py").touch()
    found = folders.look()
    assert found.strange == [f"cannot look for hooks in {folders.usr}: Not a directory"]
    assert (list(found.candidates), found.unreadable) == (["10-a"], set())


def test_hooks_are_in_the_order_of_their_names_whatever_they_are(folders: Folders) -> None:
    for path in (folders.etc / "50-b.py", folders.usr / "05-z.py", folders.etc / "10-a9-c.py"):
        path.touch()
    (folders.servers / "koordlet.json").touch()
    (folders.servers / "20-mjson").touch()
    found = folders.look()
    assert list(found.candidates) == ["05-z", "10-a9-c", "20-m", "50-b", "koordlet"]
    assert [c.server for c in found.candidates.values()] == [False, False, True, False, True]
    assert (found.masked, found.strange) == ([], [])


def test_a_file_of_the_first_directory_masks_its_namesake(folders: Folders) -> None:
    (folders.etc / "10-a.py").touch()
    (folders.usr / "10-a.py").touch()
    (folders.usr / "20-b.py").touch()
    found = folders.look()
    assert folders.taken() == {"10-a": "etc", "20-b": "usr"}
    assert [(c.path, by) for c, by in found.masked] == [(folders.usr / "10-a.py", folders.etc / "10-a.py")]
    (folders.etc / "20-b.py").symlink_to("nowhere")
    (folders.etc / "30-c.py").mkdir()
    (folders.usr / "30-c.py").touch()
    assert folders.taken() == {"10-a": "etc", "20-b": "etc", "30-c": "usr"}
    assert folders.look().candidates["20-b"].cause == "it is a link to nowhere, and nothing is there"


def test_files_in_a_directory_that_others_can_write_mask_nothing(folders: Folders) -> None:
    (folders.etc / "10-a.py").touch()
    (folders.etc / "20-b.py").touch()
    (folders.usr / "10-a.py").touch()
    folders.etc.chmod(0o777)
    found = folders.look()
    assert folders.taken() == {"10-a": "usr", "20-b": "etc"}
    assert found.candidates["10-a"].lack == ""
    assert f"the directory {folders.etc} can be written" in found.candidates["20-b"].lack
    assert [(c.path, by) for c, by in found.masked] == [(folders.etc / "10-a.py", folders.usr / "10-a.py")]


def test_a_link_to_dev_null_is_distinguished_from_other_links(folders: Folders) -> None:
    (folders.etc / "10-a.py").symlink_to("/dev/null")
    (folders.etc / "20-b.py").symlink_to("/dev/zero")
    (folders.usr / "30-c.py").touch()
    (folders.etc / "30-c.py").symlink_to(folders.usr / "30-c.py")
    found = folders.look().candidates
    assert {name: c.null for name, c in found.items()} == {"10-a": True, "30-c": False}


def test_files_that_are_not_hooks_are_ignored(folders: Folders) -> None:
    for name in (".10-a.py", "10-a.py~", "10-a.py.bak", ".10-a.py.swp", "README", "10-a.pyc", "10-a"):
        (folders.etc / name).touch()
    (folders.etc / "10-folder.py").mkdir()
    os.mkfifo(folders.etc / "10-pipe.py")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folders.etc / "10-socket.py"))
    listening.close()
    (folders.servers / "x.json").mkdir()
    (folders.servers / "x.json.tmp").touch()
    assert folders.look() == Survey()


@pytest.mark.parametrize(
    "name", ["quota.py", "1-quota.py", "100-quota.py", "10_quota.py", "10-Quota.py", "10-.py"]
)
def test_files_that_may_be_meant_as_hooks_are_reported(folders: Folders, name: str) -> None:
    (folders.etc / name).touch()
    found = folders.look()
    assert not found.candidates
    words = "it is not called NN-name.py (two digits, -, then of a-z, 0-9 and -)"
    assert found.strange == [f"hook file {folders.etc}/{name} is left alone: {words}"]


def test_a_server_with_the_name_of_another_hook_is_reported(folders: Folders) -> None:
    (folders.etc / "10-a.py").touch()
    (folders.servers / "10-a.json").touch()
    found = folders.look()
    assert folders.taken() == {"10-a": "etc"}
    path = folders.servers / "10-a.json"
    assert found.strange == [
        f"hook server {path} is left alone: there is a hook of that name in {folders.etc}/10-a.py"
    ]


def test_every_change_of_a_file_changes_its_signature(folders: Folders) -> None:
    file = folders.etc / "10-a.py"
    target = folders.usr / "target"
    file.write_text("a")
    seen = [folders.look().candidates["10-a"].signature]

    def changed() -> bool:
        seen.append(folders.look().candidates["10-a"].signature)
        return seen[-1] not in seen[:-1] and hash(seen[-1]) is not None

    assert folders.look().candidates["10-a"].signature == seen[0]
    file.write_text("ab")
    assert changed()
    os.utime(file, ns=(1, 1))
    assert changed()
    file.chmod(0o600)
    assert changed()
    folders.etc.chmod(0o777)
    assert changed()
    folders.etc.chmod(0o755)
    target.write_text("a")
    file.unlink()
    file.symlink_to(target)
    assert changed()
    target.write_text("abc")
    assert changed()
    target.unlink()
    assert changed()


def test_a_directory_that_cannot_be_read_is_reported_and_remembered(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folders.etc / "10-a.py").touch()
    (folders.usr / "20-b.py").touch()
    listed = os.listdir

    def refuse(path: Path) -> list[str]:
        if path == folders.etc:
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr("proxy.hooks.loader.directories.os.listdir", refuse)
    found = folders.look()
    assert list(found.candidates) == ["20-b"]
    assert found.unreadable == {folders.etc}
    assert found.strange == [f"cannot look for hooks in {folders.etc}: Permission denied"]


def test_nothing_is_looked_for_where_hooks_are_off(folders: Folders) -> None:
    (folders.etc / "10-a.py").touch()
    (folders.servers / "a.json").touch()
    off = HooksConfig(
        enabled=False, directory=folders.etc, vendor_directory=folders.usr, server_directory=folders.servers
    )
    assert survey(off) == Survey()
    without = HooksConfig(directory=folders.usr, vendor_directory=folders.usr, server_directory=None)
    assert survey(without) == Survey()


def test_one_directory_given_twice_masks_nothing(folders: Folders) -> None:
    (folders.etc / "10-a.py").touch()
    config = HooksConfig(directory=folders.etc, vendor_directory=folders.etc, server_directory=None)
    assert list(survey(config).candidates) == ["10-a"]
    assert survey(config).masked == []
