"""What the scripts of both packages do after an upgrade, with imitations of the programs that they call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import deb
import pytest
import rpm
from wheels import PYTHONS

NAMES = ("python3", *(f"python{python}" for python in PYTHONS), "python3.15")


def imitate(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def posttrans(root: Path) -> str:
    """Return the script that an RPM runs last, for a node below a directory."""
    text = rpm.spec({}, root, "0.9.0").partition("%posttrans\n")[2].partition("%preun\n")[0]
    return text.replace("root=\n", f"root={root}\n", 1)


def run(kind: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with programs in ``bin`` of a directory, as on a node that systemd has booted."""
    script, begin = {
        "deb": (deb.script("postinst").decode(), "case ${1:-} in"),
        "rpm": (posttrans(root), "for python in"),
    }[kind]
    assert script.count(begin) == 1
    script = script.replace(begin, f"booted() {{ :; }}\n{begin}")
    environment = {"PATH": f"{root}/bin:{os.environ['PATH']}", "DPKG_ROOT": str(root)}
    command = ["sh", "-c", script, "script", *(("configure", "0.1.0") if kind == "deb" else ())]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "usr/lib/topoproxy/bin").mkdir(parents=True)
    imitate(tmp_path / "bin/systemd-tmpfiles", "")
    return tmp_path


@pytest.mark.parametrize("kind", ["deb", "rpm"])
@pytest.mark.parametrize(
    ("active", "code", "restarted"),
    [("yes", 0, False), ("yes", 69, True), ("yes", 1, False), ("no", 0, False)],
)
def test_an_upgrade_replaces_a_daemon_that_runs(
    root: Path, kind: str, active: str, code: int, restarted: bool
) -> None:
    """Only a daemon that cannot be replaced is restarted; one whose successor does not start continues."""
    log = f'echo "${{0##*/}} $*" >>"{root}/calls"\n'
    imitate(root / "bin/systemctl", f"{log}case $1 in is-active) [ {active} = yes ] || exit 3 ;; esac")
    imitate(root / "bin/topoproxy", f"{log}exit {code}")
    done = run(kind, root)
    assert done.returncode == 0, done.stderr
    calls = (root / "calls").read_text().splitlines()
    assert calls[0] == "systemctl daemon-reload"
    assert ("topoproxy upgrade --now" in calls) == (active == "yes")
    assert ("systemctl try-restart topoproxy.service" in calls) == restarted
    assert ("continues" in done.stderr) == (code == 1)


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        ({"python3": (3, 11)}, "python3"),
        ({"python3": (3, 14), "python3.12": (3, 12)}, "python3"),
        ({"python3": (3, 9), "python3.11": (3, 11), "python3.12": (3, 12)}, "python3.12"),
        ({"python3": (3, 15), "python3.15": (3, 15), "python3.13": (3, 13)}, "python3.13"),
        ({"python3": (3, 15), "python3.15": (3, 15)}, ""),
    ],
)
def test_an_rpm_takes_a_python_that_it_has_libraries_for(
    root: Path, versions: dict[str, tuple[int, int]], chosen: str
) -> None:
    imitate(root / "bin/systemctl", "exit 3")
    for name in NAMES:
        version = (*versions.get(name, (2, 7)), 1)
        code = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
        imitate(root / "bin" / name, f'[ "$1" = -c ] && exec {sys.executable} -c "{code}" "$2"')
    assert run("rpm", root).returncode == 0
    link = root / "usr/lib/topoproxy/bin/python"
    assert (str(link.readlink()) if link.is_symlink() else "") == (chosen and f"{root}/bin/{chosen}")


def test_an_rpm_requires_a_python_that_it_has_libraries_for() -> None:
    (line,) = [line for line in rpm.spec({}, Path("/"), "0.9.0").splitlines() if "python3 >=" in line]
    either = "python3.14 or python3.13 or python3.12 or python3.11"
    assert line == f"Requires: ((python3 >= 3.11 with python3 < 3.15) or {either})"


@pytest.mark.parametrize("kind", ["deb", "rpm"])
@pytest.mark.parametrize("removed", [True, False])
def test_a_removal_without_systemd_leaves_no_links_of_enabled_units(
    root: Path, kind: str, removed: bool
) -> None:
    """Units may be enabled in a build of an image, where no systemd runs; an upgrade keeps that."""
    system = root / "etc/systemd/system"
    links = [
        system / "multi-user.target.wants/topoproxy.service",
        system / "sockets.target.wants/topoproxy.socket",
    ]
    other = system / "multi-user.target.wants/kubelet.service"
    for link in (*links, other):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"/lib/systemd/system/{link.name}")
    if kind == "deb":
        script, argument = deb.script("prerm").decode(), "remove" if removed else "upgrade"
    else:
        text = rpm.spec({}, root, "0.9.0").partition("%preun\n")[2].partition("%postun\n")[0]
        script, argument = text.replace("root=\n", f"root={root}\n", 1), "0" if removed else "1"
    imitate(root / "bin/systemctl", "exit 1")
    environment = {"PATH": f"{root}/bin:{os.environ['PATH']}", "DPKG_ROOT": str(root)}
    command = ["sh", "-c", script, "script", argument]
    subprocess.run(command, env=environment, check=True, timeout=60)
    assert [link.is_symlink() for link in links] == [not removed] * 2
    assert other.is_symlink()


@pytest.mark.parametrize(("left", "code"), [("", 0), ("ledger.jsonl", 1)])
def test_a_purge_succeeds_if_the_state_directory_is_a_mount_point(root: Path, left: str, code: int) -> None:
    """The kernel refuses to remove a mount point: rm empties it and fails. Files that stay are a failure."""
    state = root / "var/lib/topoproxy"
    state.mkdir(parents=True)
    if left:
        (state / left).touch()
    imitate(root / "bin/rm", f'case "$*" in "-rf {state}") exit 1 ;; esac\nexec /bin/rm "$@"')
    environment = {"PATH": f"{root}/bin:{os.environ['PATH']}", "DPKG_ROOT": str(root)}
    command = ["sh", "-c", deb.script("postrm").decode(), "script", "purge"]
    assert subprocess.run(command, env=environment, check=False, timeout=60).returncode == code
    assert state.exists()
