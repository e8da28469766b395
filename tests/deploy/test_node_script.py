"""The installer's script on an imitated node: its actions, their order, and what it undoes."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.leases import Leases

FILES = Path(__file__).parents[2] / "deploy/helm/topoproxy/files"
PROGRAM = r"""#!/bin/sh
# Programs of the node: what they are asked is recorded, and files below $NODE say what they answer.
name=${0##*/}
echo "$name $*" >>"$NODE/calls"
for fault in "$NODE"/faults/*; do
    [ -e "$fault" ] || continue
    case "$name $*" in *"$(cat "$fault")"*) rm "$fault"; exit 1 ;; esac
done
case "$name $*" in
"dpkg-query"*) [ -e "$NODE/installed" ] && echo "install ok installed" || exit 1 ;;
"dpkg --force-downgrade --install "*) shift 2; cp "$1" "$NODE/installed" ;;
"dpkg --purge topoproxy") rm -f "$NODE/installed" ;;
"uname -m") echo x86_64 ;;
"topoproxy attach"*)
    mkdir -p "$NODE/root$STATE/attach"
    echo attached >"$NODE/root$STATE/attach/state" ;;
"topoproxy detach --yes") rm -r "$NODE/root$STATE/attach" ;;
esac
"""
HOST = r"""#!/bin/sh
# Run a command as if on the node: its absolute paths are below $NODE/root.
for word; do
    shift
    case $word in
    /var/lib/topoproxy* | /etc/topoproxy* | /data*) word=$NODE/root$word ;;
    esac
    set -- "$@" "$word"
done
exec "$@"
"""


class Node:
    """An imitated node."""

    def __init__(self, directory: Path, api: str) -> None:
        self.directory = directory
        self.api = api
        self.state = "/var/lib/topoproxy"
        for name in ("bin", "faults", "packages", "scripts", "root"):
            (directory / name).mkdir()
        for name in ("dpkg", "dpkg-query", "uname", "topoproxy"):
            (directory / "bin" / name).write_text(PROGRAM)
            (directory / "bin" / name).chmod(0o755)
        (directory / "host").write_text(HOST)
        (directory / "host").chmod(0o755)
        (directory / "scripts/turn.py").write_bytes((FILES / "turn.py").read_bytes())
        self.package("one")
        self.configure("mode: observe\n")

    def package(self, content: str) -> None:
        (self.directory / "packages/topoproxy_0.1.0_amd64.deb").write_text(content)

    def configure(self, text: str) -> None:
        (self.directory / "scripts/config.yaml").write_text(text)

    def fault(self, text: str) -> None:
        faults = self.directory / "faults"
        (faults / str(len(list(faults.iterdir())))).write_text(text)

    def run(self, state: str) -> tuple[int, str]:
        import sys

        environment = {
            "PATH": f"{self.directory}/bin:{os.environ['PATH']}",
            "NODE": str(self.directory),
            "STATE": self.state,
            "HOST": str(self.directory / "host"),
            "PACKAGES": str(self.directory / "packages"),
            "SCRIPTS": str(self.directory / "scripts"),
            "READY": str(self.directory / "ready"),
            "PYTHON": sys.executable,
            "NODE_NAME": "node-a",
            "TURN": "kube-system/turn",
            "TURN_SECONDS": "900",
            "TURN_API": self.api,
            "TURN_POLL": "0.05",
            "ATTACH_TIMEOUT": "30",
            "ONCE": "yes",
        }
        (self.directory / "calls").write_text("")
        done = subprocess.run(
            ["sh", FILES / "node.sh", state],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    @property
    def calls(self) -> list[str]:
        """Return the commands that changed something, without queries."""
        lines = (self.directory / "calls").read_text().replace(str(self.directory), "").splitlines()
        return [line for line in lines if not line.startswith(("dpkg-query", "uname"))]

    @property
    def installed(self) -> str:
        path = self.directory / "installed"
        return path.read_text() if path.exists() else ""

    @property
    def attached(self) -> bool:
        return (self.directory / f"root{self.state}/attach").exists()

    @property
    def drop_in(self) -> str:
        path = self.directory / "root/etc/topoproxy/config.d/90-helm.yaml"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def leases() -> Iterator[Leases]:
    made = Leases()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.02,))
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.fixture
def node(tmp_path: Path, leases: Leases) -> Node:
    return Node(tmp_path, f"http://127.0.0.1:{leases.server.server_port}")


INSTALL = "dpkg --force-downgrade --install /root/var/lib/topoproxy-installer/next.deb"
BACK = "dpkg --force-downgrade --install /root/var/lib/topoproxy-installer/current.deb"


def test_a_node_is_installed_and_attached_and_the_lease_released(node: Node, leases: Leases) -> None:
    code, reported = node.run("attached")
    assert code == 0, reported
    assert node.calls == [
        INSTALL,
        "topoproxy check-config",
        "topoproxy attach --yes --timeout 30",
        "topoproxy status --wait-ready=30s",
    ]
    assert (node.installed, node.attached, node.drop_in) == ("one", True, "mode: observe\n")
    assert leases.holder == ""
    assert (node.directory / "ready").exists()


def test_a_second_run_changes_nothing(node: Node) -> None:
    node.run("attached")
    assert node.run("attached")[0] == 0
    assert node.calls == [
        "topoproxy check-config",
        "topoproxy reload",
        "topoproxy attach --yes --timeout 30",
        "topoproxy status --wait-ready=30s",
    ]


def test_an_update_installs_the_next_package(node: Node) -> None:
    node.run("attached")
    node.package("two")
    assert node.run("attached")[0] == 0
    assert node.calls[0] == INSTALL
    assert node.calls.index("topoproxy reload") < node.calls.index("topoproxy attach --yes --timeout 30")
    assert node.installed == "two"


@pytest.mark.parametrize("step", ["--install", "check-config", "attach --yes", "status --wait-ready"])
def test_a_failed_first_installation_leaves_nothing_and_keeps_the_lease(
    node: Node, leases: Leases, step: str
) -> None:
    node.fault(step)
    code, reported = node.run("attached")
    assert code == 1
    assert "the node is reverted" in reported
    assert (node.installed, node.attached, node.drop_in) == ("", False, "")
    assert leases.holder == "node-a"
    assert not (node.directory / "ready").exists()
    assert node.run("attached")[0] == 0, "the next attempt succeeds"
    assert (node.installed, node.attached, leases.holder) == ("one", True, "")


@pytest.mark.parametrize(
    "step", ["--install", "check-config", "reload", "attach --yes", "status --wait-ready"]
)
def test_a_failed_update_restores_the_package_and_the_configuration(node: Node, step: str) -> None:
    node.run("attached")
    node.package("two")
    node.configure("mode: enforce\n")
    node.fault(step)
    assert node.run("attached")[0] == 1
    assert BACK in node.calls
    assert (node.installed, node.attached, node.drop_in) == ("one", True, "mode: observe\n")


def test_installed_attaches_nothing(node: Node) -> None:
    assert node.run("installed")[0] == 0
    assert (node.installed, node.attached) == ("one", False)


def test_absent_detaches_before_it_purges(node: Node, leases: Leases) -> None:
    node.run("attached")
    assert node.run("absent")[0] == 0
    assert node.calls == ["topoproxy detach --yes", "dpkg --purge topoproxy"]
    assert not (node.directory / "root/var/lib/topoproxy-installer").exists()
    assert node.run("absent")[0] == 0
    assert node.calls == []
    assert leases.holder == ""


@pytest.mark.parametrize("by_chart", [True, False])
def test_a_state_directory_elsewhere_is_found(node: Node, by_chart: bool) -> None:
    node.state = "/data/topo"
    if by_chart:
        node.configure('stateDir: "/data/topo" # on the fast disk\n')
    else:
        (node.directory / "root/etc/topoproxy").mkdir(parents=True)
        file = node.directory / "root/etc/topoproxy/config.yaml"
        file.write_text("mode: observe\nstateDir: /data/topo\n")
    assert node.run("attached")[0] == 0
    assert node.run("attached")[0] == 0
    assert "topoproxy reload" in node.calls, "the script knows that the node is attached"
    assert node.run("absent")[0] == 0
    assert node.calls == ["topoproxy detach --yes", "dpkg --purge topoproxy"]


def test_absent_that_cannot_detach_purges_nothing(node: Node) -> None:
    node.run("attached")
    node.fault("detach --yes")
    assert node.run("absent")[0] == 1
    assert node.calls == ["topoproxy detach --yes"]
    assert node.installed == "one"


def test_a_node_waits_for_the_lease(node: Node, leases: Leases) -> None:
    leases.hold("node-b", 10)
    leases.free_after = 3
    code, reported = node.run("installed")
    assert code == 0
    assert "waits: node node-b is being changed" in reported
    assert reported.count("waits") == 1


def test_a_holder_that_does_not_renew_loses_the_lease_and_a_conflict_is_retried(
    node: Node, leases: Leases
) -> None:
    leases.hold("node-b", 1000)
    leases.conflicts = 2
    assert node.run("installed")[0] == 0
    assert leases.holder == ""


def test_a_state_that_does_not_exist_is_refused(node: Node) -> None:
    assert node.run("here")[0] == 2
    assert node.installed == ""
