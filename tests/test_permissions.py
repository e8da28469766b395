"""Files that run as root are trusted only if no other user can write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.permissions import TrustCheck, link_chain

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files to others")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    made = tmp_path / "hooks.d"
    made.mkdir(mode=0o755)
    return made


@pytest.fixture
def file(base: Path) -> Path:
    made = base / "10-a.py"
    made.write_text("x = 1\n")
    made.chmod(0o644)
    return made


def test_what_only_root_can_write_is_trusted(file: Path) -> None:
    assert TrustCheck().file_problem(file) == ""
    file.chmod(0o400)
    assert TrustCheck().file_problem(file) == ""


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (0o664, "can be written by its group (mode 0664): chmod g-w {}"),
        (0o646, "can be written by others (mode 0646): chmod o-w {}"),
        (0o777, "can be written by its group and others (mode 0777): chmod go-w {}"),
    ],
)
def test_other_writers_of_a_file_are_named_with_the_command(file: Path, mode: int, message: str) -> None:
    file.chmod(mode)
    assert TrustCheck().file_problem(file) == f"{file} {message.format(file)}"


@as_root
def test_a_file_of_another_user_is_reported_with_the_command(file: Path) -> None:
    os.chown(file, 1234, 0)
    assert TrustCheck().file_problem(file) == f"{file} is owned by user 1234: chown root {file}"


@as_root
def test_a_parent_directory_of_another_user_is_reported_too(file: Path, tmp_path: Path) -> None:
    os.chown(file.parent, 1234, 0)
    assert (
        TrustCheck().file_problem(file)
        == f"the directory {file.parent} is owned by user 1234: chown root {file.parent}"
    )
    os.chown(file.parent, 0, 0)
    os.chown(tmp_path, 1234, 0)
    assert (
        TrustCheck().directory_problem(file.parent)
        == f"the directory {tmp_path} is owned by user 1234: chown root {tmp_path}"
    )


def test_a_parent_directory_that_others_can_write_is_reported_too(file: Path, tmp_path: Path) -> None:
    file.parent.chmod(0o775)
    expected = f"the directory {file.parent} can be written by its group (mode 0775): chmod g-w {file.parent}"
    assert TrustCheck().file_problem(file) == expected
    file.parent.chmod(0o755)
    tmp_path.chmod(0o757)
    expected = f"the directory {tmp_path} can be written by others (mode 0757): chmod o-w {tmp_path}"
    assert TrustCheck().file_problem(file) == expected


def test_a_sticky_directory_is_accepted_only_above_the_files_directory(file: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert TrustCheck().file_problem(file) == ""
    tmp_path.chmod(0o755)
    file.parent.chmod(0o1777)
    assert "can be written by its group and others (mode 1777)" in TrustCheck().file_problem(file)


def test_each_link_of_a_path_is_checked_with_its_directory(file: Path, tmp_path: Path) -> None:
    open_directory = tmp_path / "open"
    open_directory.mkdir()
    (open_directory / "middle").symlink_to(file)
    first = file.parent / "20-b.py"
    first.symlink_to("../open/middle")
    assert TrustCheck().file_problem(first) == ""
    assert [step.name for step in link_chain(first)] == ["20-b.py", "middle", "10-a.py"]
    open_directory.chmod(0o777)
    assert f"the directory {open_directory} can be written" in TrustCheck().file_problem(first)
    open_directory.chmod(0o755)
    file.chmod(0o666)
    assert f"{file} can be written" in TrustCheck().file_problem(first)


def test_a_directory_behind_a_link_is_resolved(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(file.parent)
    file.parent.chmod(0o777)
    assert f"the directory {file.parent} can be written" in TrustCheck().directory_problem(tmp_path / "link")


def test_only_regular_files_are_trusted(base: Path) -> None:
    os.mkfifo(base / "10-a.py", 0o600)
    assert TrustCheck().file_problem(base / "10-a.py") == f"{base}/10-a.py is not a regular file"


def test_a_cycle_of_links_is_reported(base: Path) -> None:
    (base / "a").symlink_to("b")
    (base / "b").symlink_to("a")
    with pytest.raises(OSError, match="links in a row"):
        TrustCheck().file_problem(base / "a")
