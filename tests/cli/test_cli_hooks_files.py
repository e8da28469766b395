"""``topoproxy hooks new``, ``enable``, ``disable`` and ``points``: files, links, and the reference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.cli.hooks import file_commands
from proxy.cli.main import run_command_line

TEMPLATE = "API_VERSION = 1\n"


class Node:
    """The directories of a node, and the commands."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory, self.vendor, self.servers = (
            root / "etc/hooks.d",
            root / "usr/hooks.d",
            root / "servers",
        )
        self.shipped = root / "shipped"
        for directory in (self.vendor, self.servers, self.shipped):
            directory.mkdir(parents=True)
        for name in ("00-template", "10-quota", "30-cpus-file", "60-quota"):
            (self.shipped / f"{name}.py").write_text(TEMPLATE if "template" in name else f"# {name}\n")
        self.config = root / "c.yaml"
        self.set()
        self.capsys = capsys

    def set(self, more: str = "") -> None:
        self.config.write_text(
            f"hooks: {{directory: {self.directory}, vendorDirectory: {self.vendor}, "
            f"serverDirectory: {self.servers}{more}}}\n"
        )

    def run(self, *args: object, config: bool = True) -> tuple[int, str]:
        """Run a command; returns its exit code and its output."""
        more = ["--config", str(self.config)] if config else []
        code = run_command_line(["hooks", *map(str, args), *more])
        assert isinstance(code, int)
        reported = self.capsys.readouterr()
        return code, reported.out + reported.err

    def run_ok(self, *args: object) -> str:
        code, reported = self.run(*args)
        assert code == 0, reported
        return reported


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Node:
    created = Node(tmp_path, capsys)
    monkeypatch.setattr(file_commands, "shipped_directory", lambda: created.shipped)
    return created


def test_a_new_hook_is_a_copy_of_the_template_writable_by_its_owner(node: Node) -> None:
    before = os.umask(0o077)
    try:
        reported = node.run_ok("new", "50-mine")
    finally:
        os.umask(before)
    created = node.directory / "50-mine.py"
    assert created.read_text() == TEMPLATE
    assert created.stat().st_mode & 0o777 == 0o644
    assert node.directory.stat().st_mode & 0o022 == 0
    assert reported.startswith(f"created {created}; next:\n")
    assert f"topoproxy hooks validate {created}\n" in reported
    assert [entry.name for entry in node.directory.iterdir()] == ["50-mine.py"], "no draft is left"


def test_a_new_hook_is_configured_under_its_own_name(tmp_path: Path) -> None:
    """The template is the shipped one."""
    assert run_command_line(["hooks", "new", "50-mine", "--directory", str(tmp_path)]) == 0
    text = (tmp_path / "50-mine.py").read_text()
    assert "\n        50-mine:\n" in text
    assert "00-template" not in text


@pytest.mark.usefixtures("removed_directory")
def test_a_relative_place_in_a_directory_that_was_removed_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_command_line(["hooks", "new", "50-mine", "--directory", "d"]) == 2
    error = "topoproxy: cannot use --directory d: the current directory was removed\n"
    assert capsys.readouterr().err == error


def test_a_new_hook_may_copy_a_shipped_one_into_another_directory(node: Node, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    node.run_ok("new", "51-mine.py", "--from", "30-cpus-file", "--directory", tmp_path / "src")
    assert (tmp_path / "src/51-mine.py").read_text() == "# 30-cpus-file\n"
    assert not node.directory.exists()


@pytest.mark.parametrize(
    ("args", "code", "reported"),
    [
        (
            ["mine"],
            2,
            'a name is NN-name (two digits, "-", then characters a-z, 0-9 and "-"), such as 50-mine',
        ),
        (["50-Mine"], 2, "such as 50-mine"),
        (["50-my_own"], 2, "such as 50-mine"),
        (["../50-mine"], 2, "a name is NN-name"),
        (["50-mine", "--from", "nothing"], 2, "cannot use nothing: there is no such hook"),
        (["50-mine", "--from", "quota"], 2, "cannot use quota: it may be 10-quota or 60-quota"),
        (["50-mine", "--from", "cpu-file"], 2, "did you mean 30-cpus-file?"),
        (["50-mine", "--directory", "/dev/null"], 73, "50-mine.py: /dev/null is not a directory"),
        (
            ["50-mine", "--directory", "/proc/nothing"],
            73,
            "/proc/nothing/50-mine.py: no such directory",
        ),
    ],
)
def test_a_hook_that_cannot_be_created_is_reported(
    node: Node, args: list[str], code: int, reported: str
) -> None:
    result = node.run("new", *args)
    assert result[0] == code
    assert reported in result[1]


def test_only_the_directory_of_the_configuration_is_created(node: Node, tmp_path: Path) -> None:
    missing = tmp_path / "missing/src"
    for option in ("--directory", "--folder"):
        assert node.run("new", "50-mine", option, str(missing)) == (
            73,
            f"topoproxy: cannot create {missing}/50-mine.py: no such directory\n",
        )
    assert not missing.parent.exists()
    assert not node.directory.exists()
    node.run_ok("new", "50-mine", "--directory", node.directory)
    assert (node.directory / "50-mine.py").read_text() == TEMPLATE


def test_an_existing_file_is_not_overwritten(node: Node) -> None:
    node.directory.mkdir(parents=True)
    (node.directory / "50-mine.py").write_text("mine")
    assert node.run("new", "50-mine") == (
        73,
        f"topoproxy: cannot create {node.directory}/50-mine.py: it exists already\n",
    )
    assert (node.directory / "50-mine.py").read_text() == "mine"


def test_a_shipped_hook_is_enabled_by_a_link_and_disabled_by_removing_it(node: Node) -> None:
    link = node.directory / "30-cpus-file.py"
    reported = node.run_ok("enable", "cpus-file")
    assert link.readlink() == node.shipped / "30-cpus-file.py"
    assert reported.startswith(f"enabled 30-cpus-file: {link} -> {link.readlink()}\n")
    assert "is enabled already" in node.run_ok("enable", "30-cpus-file.py")
    assert node.run_ok("disable", "cpus-file").startswith(
        f"disabled 30-cpus-file: the link {link} is removed\n"
    )
    assert not os.path.lexists(link)
    assert node.run_ok("disable", "cpus-file") == "30-cpus-file is not enabled\n"
    assert list(node.directory.iterdir()) == []


def test_a_file_writable_by_others_is_enabled_with_a_note(node: Node) -> None:
    (node.shipped / "10-quota.py").chmod(0o666)
    reported = node.run_ok("enable", "10-quota")
    assert reported.startswith("enabled 10-quota: ")
    assert reported.endswith(f"chmod go-w {node.shipped}/10-quota.py\n")
    assert "note: the daemon will not run it: " in reported


def test_a_vendors_hook_is_masked_and_unmasked(node: Node) -> None:
    (node.vendor / "20-theirs.py").write_text("# theirs\n")
    mask = node.directory / "20-theirs.py"
    assert "20-theirs is enabled already" in node.run_ok("enable", "20-theirs")
    reported = node.run_ok("disable", "theirs")
    assert mask.readlink() == Path("/dev/null")
    assert f"{mask} -> /dev/null masks {node.vendor}/20-theirs.py" in reported
    assert node.run_ok("disable", "theirs") == "20-theirs is not enabled\n"
    assert "is no longer masked" in node.run_ok("enable", "theirs")
    assert not os.path.lexists(mask)


def test_a_link_over_a_vendors_hook_becomes_a_mask(node: Node) -> None:
    (node.vendor / "10-quota.py").write_text("# theirs\n")
    node.directory.mkdir(parents=True)
    (node.directory / "10-quota.py").symlink_to(node.shipped / "10-quota.py")
    node.run_ok("disable", "10-quota")
    assert (node.directory / "10-quota.py").readlink() == Path("/dev/null")


def test_a_mask_without_a_file_is_replaced_by_the_shipped_hook(node: Node) -> None:
    node.directory.mkdir(parents=True)
    (node.directory / "10-quota.py").symlink_to("/dev/null")
    (node.directory / "70-gone.py").symlink_to("/dev/null")
    node.run_ok("enable", "10-quota")
    assert (node.directory / "10-quota.py").readlink() == node.shipped / "10-quota.py"
    assert node.run("enable", "70-gone")[1].endswith("masks a file that does not exist; remove it\n")


def test_an_empty_file_is_removed_like_a_mask(node: Node) -> None:
    node.directory.mkdir(parents=True)
    ours = node.directory / "20-theirs.py"
    (node.vendor / "20-theirs.py").write_text("# theirs\n")
    for name in ("20-theirs", "10-quota"):
        (node.directory / f"{name}.py").touch()
        assert node.run_ok("disable", name) == f"{name} is not enabled\n"
    assert "is no longer masked" in node.run_ok("enable", "theirs")
    assert not os.path.lexists(ours)
    node.run_ok("enable", "10-quota")
    assert (node.directory / "10-quota.py").readlink() == node.shipped / "10-quota.py"
    (node.vendor / "60-quota.py").touch()
    node.run_ok("enable", "60-quota")
    assert (node.directory / "60-quota.py").readlink() == node.shipped / "60-quota.py", (
        "the file of the directory goes first"
    )
    (node.vendor / "80-none.py").touch()
    assert node.run("enable", "80-none")[1].endswith("80-none.py is empty, and so disables it\n")


def test_a_dangling_link_is_replaced(node: Node) -> None:
    node.directory.mkdir(parents=True)
    for name in ("10-quota", "70-gone"):
        (node.directory / f"{name}.py").symlink_to("/nonexistent/old.py")
    (node.directory / "60-quota.py").symlink_to("60-quota.py")
    node.run_ok("enable", "10-quota")
    node.run_ok("enable", "60-quota")
    assert (node.directory / "10-quota.py").readlink() == node.shipped / "10-quota.py"
    assert (node.directory / "60-quota.py").readlink() == node.shipped / "60-quota.py"
    code, reported = node.run("enable", "70-gone")
    assert code == 2
    assert reported.endswith(
        "70-gone.py -> /nonexistent/old.py points to nothing; remove it, or correct the link\n"
    )


def test_a_directory_with_the_name_of_a_hook_is_no_hook(node: Node) -> None:
    (node.directory / "10-quota.py").mkdir(parents=True)
    code, reported = node.run("enable", "10-quota")
    assert code == 1
    assert reported.endswith("10-quota.py is not a file; remove it, or rename it\n")


def test_the_users_own_file_is_not_changed(node: Node) -> None:
    node.directory.mkdir(parents=True)
    (node.directory / "50-mine.py").write_text("# mine\n")
    (node.servers / "koordlet.json").write_text("{}")
    code, reported = node.run("disable", "mine")
    assert code == 1
    assert reported.endswith("is a file of your own; rename it, for example to 50-mine.py.off\n")
    code, reported = node.run("disable", "koordlet")
    assert code == 1
    assert reported.endswith(f"koordlet: {node.servers}/koordlet.json names a server; remove that file\n")
    assert node.run("enable", "nothing")[0] == node.run("disable", "nothing")[0] == 2


def test_drafts_and_missing_directories_are_ignored(node: Node) -> None:
    node.directory.mkdir(parents=True)
    (node.directory / ".77-draft.py").write_text("half")
    node.set(more=", ownedCPUs: true")
    node.config.write_text(node.config.read_text().replace(str(node.servers), '""'))
    assert node.run("disable", ".77-draft")[0] == node.run("disable", "draft")[0] == 2
    assert node.run_ok("disable", "cpus-file") == "30-cpus-file is not enabled\n"


def test_the_registration_for_koordinators_proxy_is_printed(node: Node) -> None:
    assert node.run("registration")[0] == 78
    node.set(", serve: /run/topoproxy/hooks.sock")
    assert '"remote-endpoint": "/run/topoproxy/hooks.sock"' in node.run_ok("registration")


def test_the_output_reports_that_no_hook_runs(node: Node) -> None:
    node.set(", enabled: false")
    assert node.run_ok("enable", "cpus-file").endswith(
        "hooks.enabled is false in the configuration: no hook runs\n"
    )


def test_a_directory_that_cannot_be_written_is_reported(node: Node) -> None:
    node.directory.parent.mkdir()
    node.directory.write_text("no directory")
    code, reported = node.run("enable", "cpus-file")
    assert code == 73
    assert reported.startswith(f"topoproxy: cannot create the link {node.directory}/30-cpus-file.py: ")


def test_a_directory_that_is_a_link_to_itself_is_reported(node: Node) -> None:
    node.directory.parent.mkdir()
    node.directory.symlink_to(node.directory)
    reported = f"topoproxy: cannot create {node.directory}/50-mine.py: {node.directory} is not a directory\n"
    assert node.run("new", "50-mine") == (73, reported)


def test_a_directory_that_cannot_be_read_is_reported(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("proxy.cli.hooks.file_commands.os.listdir", refused)
    for command in ("enable", "disable"):
        assert node.run(command, "cpus-file") == (
            77,
            f"topoproxy: cannot read the directory {node.directory}: Permission denied\n",
        )


def test_the_reference_is_printed_in_the_terminal(node: Node) -> None:
    def points(*args: str) -> tuple[int, str]:
        return node.run("points", *args, config=False)

    lines = points()[1].splitlines()
    assert lines[0].split() == ["POINT", "MAY", "ANSWER", "WHEN"]
    assert len(lines) == 25
    assert max(map(len, lines)) == 120
    code, reported = points("pre_create_container", "Veto")
    assert code == 0
    assert reported.startswith(
        "pre_create_container(event: PreCreateContainer)\n  A container is about to be created"
    )
    assert "\n  decision: Decision\n      The placement that it will get.\n" in reported
    assert "may be vetoed. What all hooks want together is shown to" in " ".join(reported.split())
    assert "](#" not in reported
    assert "\n\nVeto\n" in reported
    assert points("PreCreateContainer")[1] == points("pre_create_container")[1]
    code, reported = points("pre_create")
    assert (code, reported.splitlines()[-1][-32:]) == (2, "did you mean pre_create_container?"[-32:])
    assert points("--markdown")[1].startswith("# Hook points\n")
    assert points("--markdown", "Veto")[0] == 2
