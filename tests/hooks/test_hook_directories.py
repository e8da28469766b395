"""The selection of hook files in the directories."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from proxy.config.hooks import HooksConfig
from proxy.hooks.loader.directories import HookFileScan, scan_directories


class HookDirectories:
    """The three directories; the first lookup finds them absent."""

    def __init__(self, root: Path) -> None:
        self.etc, self.usr, self.servers = root / "etc", root / "usr", root / "servers"
        self.config = HooksConfig(
            directory=self.etc, vendor_directory=self.usr, server_directory=self.servers
        )

    def make(self) -> HookDirectories:
        for parent in (self.etc, self.usr, self.servers):
            parent.mkdir(mode=0o755)
        return self

    def scan(self) -> HookFileScan:
        return scan_directories(self.config)

    def taken(self) -> dict[str, str]:
        return {name: str(c.path.parent.name) for name, c in self.scan().candidates.items()}


@pytest.fixture
def dirs(tmp_path: Path) -> HookDirectories:
    return HookDirectories(tmp_path).make()


def test_absent_directories_are_no_error(tmp_path: Path) -> None:
    dirs = HookDirectories(tmp_path)
    assert dirs.scan() == HookFileScan()
    (tmp_path / "etc").write_text("not a directory")
    assert dirs.scan() == HookFileScan(
        ignored_files=[f"cannot look for hooks in {dirs.etc}: Not a directory"]
    )


def test_a_directory_that_is_a_file_is_reported(dirs: HookDirectories) -> None:
    dirs.usr.rmdir()
    dirs.usr.touch()
    (dirs.etc / "10-a.py").touch()
    found = dirs.scan()
    assert found.ignored_files == [f"cannot look for hooks in {dirs.usr}: Not a directory"]
    assert (list(found.candidates), found.unreadable) == (["10-a"], set())


def test_hooks_and_servers_are_in_the_order_of_their_names(dirs: HookDirectories) -> None:
    for path in (dirs.etc / "50-b.py", dirs.usr / "05-z.py", dirs.etc / "10-a9-c.py"):
        path.touch()
    (dirs.servers / "koordlet.json").touch()
    (dirs.servers / "20-mjson").touch()
    found = dirs.scan()
    assert list(found.candidates) == ["05-z", "10-a9-c", "20-m", "50-b", "koordlet"]
    assert [c.server for c in found.candidates.values()] == [False, False, True, False, True]
    assert (found.masked, found.ignored_files) == ([], [])


def test_a_file_of_the_first_directory_masks_one_with_the_same_name(dirs: HookDirectories) -> None:
    (dirs.etc / "10-a.py").touch()
    (dirs.usr / "10-a.py").touch()
    (dirs.usr / "20-b.py").touch()
    found = dirs.scan()
    assert dirs.taken() == {"10-a": "etc", "20-b": "usr"}
    assert [(c.path, by) for c, by in found.masked] == [(dirs.usr / "10-a.py", dirs.etc / "10-a.py")]
    (dirs.etc / "20-b.py").symlink_to("nowhere")
    (dirs.etc / "30-c.py").mkdir()
    (dirs.usr / "30-c.py").touch()
    assert dirs.taken() == {"10-a": "etc", "20-b": "etc", "30-c": "usr"}
    assert dirs.scan().candidates["20-b"].cause == "it is a link to nowhere, and nothing is there"


def test_files_in_a_directory_that_others_can_write_mask_nothing(dirs: HookDirectories) -> None:
    (dirs.etc / "10-a.py").touch()
    (dirs.etc / "20-b.py").touch()
    (dirs.usr / "10-a.py").touch()
    dirs.etc.chmod(0o777)
    found = dirs.scan()
    assert dirs.taken() == {"10-a": "usr", "20-b": "etc"}
    assert found.candidates["10-a"].distrust == ""
    assert f"the directory {dirs.etc} can be written" in found.candidates["20-b"].distrust
    assert [(c.path, by) for c, by in found.masked] == [(dirs.etc / "10-a.py", dirs.usr / "10-a.py")]


def test_a_link_to_dev_null_is_distinguished_from_other_links(dirs: HookDirectories) -> None:
    (dirs.etc / "10-a.py").symlink_to("/dev/null")
    (dirs.etc / "20-b.py").symlink_to("/dev/zero")
    (dirs.usr / "30-c.py").touch()
    (dirs.etc / "30-c.py").symlink_to(dirs.usr / "30-c.py")
    found = dirs.scan().candidates
    assert {name: c.is_null_link for name, c in found.items()} == {"10-a": True, "30-c": False}


def test_a_scan_measures_its_cpu_time(dirs: HookDirectories) -> None:
    assert dirs.scan().cpu_seconds > 0


def test_files_that_are_not_hooks_are_ignored(dirs: HookDirectories) -> None:
    for name in (".10-a.py", "10-a.py~", "10-a.py.bak", ".10-a.py.swp", "README", "10-a.pyc", "10-a"):
        (dirs.etc / name).touch()
    (dirs.etc / "10-directory.py").mkdir()
    os.mkfifo(dirs.etc / "10-pipe.py")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(dirs.etc / "10-socket.py"))
    listening.close()
    (dirs.servers / "x.json").mkdir()
    (dirs.servers / "x.json.tmp").touch()
    assert dirs.scan() == HookFileScan()


@pytest.mark.parametrize(
    "name", ["quota.py", "1-quota.py", "100-quota.py", "10_quota.py", "10-Quota.py", "10-.py"]
)
def test_files_that_may_be_meant_as_hooks_are_reported(dirs: HookDirectories, name: str) -> None:
    (dirs.etc / name).touch()
    found = dirs.scan()
    assert not found.candidates
    reason = 'it is not named NN-name.py (two digits, "-", then characters a-z, 0-9 and "-")'
    assert found.ignored_files == [f"hook file {dirs.etc}/{name} is not used: {reason}"]


def test_a_name_that_is_not_utf_8_is_reported(dirs: HookDirectories) -> None:
    for directory, name in ((dirs.servers, b"a\xff.json"), (dirs.etc, b"a\xff.py")):
        Path(os.fsdecode(os.fsencode(directory) + b"/" + name)).touch()
    (dirs.servers / "é.json").touch()
    found = dirs.scan()
    assert list(found.candidates) == ["é"]
    assert [line.partition(" (")[0] for line in found.ignored_files] == [
        rf"hook file {dirs.etc}/a\udcff.py is not used: it is not named NN-name.py",
        rf"hook server {dirs.servers}/a\udcff.json is not used: its name is not UTF-8",
    ]


def test_a_server_with_the_name_of_another_hook_is_reported(dirs: HookDirectories) -> None:
    (dirs.etc / "10-a.py").touch()
    (dirs.servers / "10-a.json").touch()
    found = dirs.scan()
    assert dirs.taken() == {"10-a": "etc"}
    path = dirs.servers / "10-a.json"
    assert found.ignored_files == [
        f"hook server {path} is not used: there is a hook of that name in {dirs.etc}/10-a.py"
    ]


def test_every_change_of_a_file_changes_its_signature(dirs: HookDirectories) -> None:
    file = dirs.etc / "10-a.py"
    target = dirs.usr / "target"
    file.write_text("a")
    signatures = [dirs.scan().candidates["10-a"].signature]

    def changed() -> bool:
        signatures.append(dirs.scan().candidates["10-a"].signature)
        return signatures[-1] not in signatures[:-1] and hash(signatures[-1]) is not None

    assert dirs.scan().candidates["10-a"].signature == signatures[0]
    file.write_text("ab")
    assert changed()
    os.utime(file, ns=(1, 1))
    assert changed()
    file.chmod(0o600)
    assert changed()
    dirs.etc.chmod(0o777)
    assert changed()
    dirs.etc.chmod(0o755)
    target.write_text("a")
    file.unlink()
    file.symlink_to(target)
    assert changed()
    target.write_text("abc")
    assert changed()
    target.unlink()
    assert changed()


def test_a_directory_that_cannot_be_read_is_reported_and_remembered(
    dirs: HookDirectories, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dirs.etc / "10-a.py").touch()
    (dirs.usr / "20-b.py").touch()
    listed = os.listdir

    def refuse(path: Path) -> list[str]:
        if path == dirs.etc:
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr("proxy.hooks.loader.directories.os.listdir", refuse)
    found = dirs.scan()
    assert list(found.candidates) == ["20-b"]
    assert found.unreadable == {dirs.etc}
    assert found.ignored_files == [f"cannot look for hooks in {dirs.etc}: Permission denied"]


def test_directories_are_not_read_if_hooks_are_disabled(dirs: HookDirectories) -> None:
    (dirs.etc / "10-a.py").touch()
    (dirs.servers / "a.json").touch()
    off = HooksConfig(
        enabled=False, directory=dirs.etc, vendor_directory=dirs.usr, server_directory=dirs.servers
    )
    assert scan_directories(off) == HookFileScan()
    without = HooksConfig(directory=dirs.usr, vendor_directory=dirs.usr, server_directory=None)
    assert scan_directories(without) == HookFileScan()


def test_one_directory_given_twice_masks_nothing(dirs: HookDirectories) -> None:
    (dirs.etc / "10-a.py").touch()
    config = HooksConfig(directory=dirs.etc, vendor_directory=dirs.etc, server_directory=None)
    assert list(scan_directories(config).candidates) == ["10-a"]
    assert scan_directories(config).masked == []
