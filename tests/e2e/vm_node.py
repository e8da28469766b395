"""The scenario of a node: README's three commands, an upgrade and a downgrade, a kill, and a removal.

kubelet is a unit as kubeadm leaves it (its endpoint is in config.yaml and instance-config.yaml), and static
pods run before topoproxy is installed. At the end each file of the node is as before. With ``chart`` the
installer of the Helm chart attaches the node and removes everything again, with an imitated API server.

    python3 vm_node.py hand|chart systemd

Needs /in/kubelet (1.34 or later), /in/old and /in/new with a Debian package each, /in/README.md, and the
chart's files and leases.py in /in/chart.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, cast

import grpc
import yaml
from cri import Cri
from vm_guest import ALL, LONG_S, RUNTIME, SOCKET, page_of, save_journals, step, wait
from vm_kubelet import MANIFESTS, ROOT, KubeletNode, container, kubelet_settings

sys.path.insert(0, "/in/chart")

from leases import Leases

from proxy.config import Config

UNITS = Path("/usr/lib/systemd/system")
ENDPOINT = f"unix://{RUNTIME}"
KUBEADM = """[Service]
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml"
Environment=GOMAXPROCS=2
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
ExecStart=
ExecStart=/in/kubelet $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS
"""
SETTINGS = {"cpuManagerPolicy": "static", "reservedSystemCPUs": "0", "callTimeout": "60s"}
LONG_TIME_LIMITS = "[Service]\nTimeoutStartSec=300\nWatchdogSec=300\nTimeoutStopSec=300\n"
"""Under emulation everything takes 25 times as long."""
LISTING = (
    "find /etc /usr /var/lib/kubelet/*.yaml /var/lib/kubelet/*.env -xdev -name __pycache__ -prune -o"
    " -not -type d -printf '%p %m %U:%G %s %T@ %l\\n' -o -type d -printf '%p %m %U:%G\\n' | sort;"
    " find /etc /var/lib/kubelet/*.yaml /var/lib/kubelet/*.env /usr/bin /usr/lib/systemd -xdev -type f"
    " -print0 | sort -z | xargs -0 sha256sum; ls -A /var/lib /run | grep topoproxy"
)


def shell(command: str, *, check: bool = True) -> str:
    """Run a shell command; print it and its output."""
    begin = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    step(f"$ {command}   ({time.monotonic() - begin:.1f} s, exit {done.returncode})")
    print((done.stdout + done.stderr)[-3000:], flush=True)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def list_files() -> list[str]:
    """List the node's files with mode, owner, time and, if it matters, hash."""
    done = subprocess.run(["bash", "-c", LISTING], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if not line.startswith(("/etc/.pwd.lock", "/etc/mtab"))]


def check_files_unchanged(before: list[str], after: list[str], when: str) -> None:
    lost, left = sorted(set(before) - set(after)), sorted(set(after) - set(before))
    assert not lost, f"{when}: {lost[:20]}"
    assert not left, f"{when}: {left[:20]}"
    step(f"{when}: all {len(before)} lines of the list of files are as before")


def readme_commands() -> list[str]:
    """The commands of README's chapter about a node, as written: install, then enforce at once."""
    chapter = Path("/in/README.md").read_text().split("## On a node\n", 1)[1]
    return [*_block(chapter), *_block(chapter.split("**Or enforce at once:**\n", 1)[1])]


def _block(text: str) -> list[str]:
    lines = dropwhile(lambda line: not line.startswith("    "), text.splitlines())
    return [line.strip() for line in takewhile(lambda line: line.startswith("    "), lines)]


def make_node(driver: str) -> KubeletNode:
    """Make the node, as kubeadm leaves it, and wait for pods."""
    (UNITS / "kubelet.service.d").mkdir(parents=True)
    (UNITS / "kubelet.service").write_text(
        "[Service]\nExecStart=/in/kubelet\nRestart=always\nRestartSec=3\n[Install]\nWantedBy=multi-user.target\n"
    )
    (UNITS / "kubelet.service.d/10-kubeadm.conf").write_text(KUBEADM)
    for directory in (ROOT, MANIFESTS, Path("/var/log/pods")):
        directory.mkdir(parents=True, exist_ok=True)
    settings = kubelet_settings(driver, signed=False) | {
        "containerRuntimeEndpoint": ENDPOINT,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "featureGates": {},
    }
    (ROOT / "config.yaml").write_text(yaml.safe_dump(settings))
    (ROOT / "instance-config.yaml").write_text(f'containerRuntimeEndpoint: "{ENDPOINT}"\n')
    (ROOT / "kubeadm-flags.env").write_text('KUBELET_KUBEADM_ARGS="--hostname-override=bed --v=2"\n')
    shell("systemctl daemon-reload && systemctl enable --now kubelet")
    node = KubeletNode(driver, cast("Any", None))
    wait("kubelet to answer", lambda: answers(node), LONG_S)
    for name, cpu in (("own", "2"), ("part", "250m")):
        node.add(name, container("main", cpu))
    wait("both pods to run", lambda: set(node.ids()) == {"own/main", "part/main"}, 2 * LONG_S)
    return node


def answers(node: KubeletNode) -> bool:
    try:
        return node.pods() is not None
    except OSError:
        return False


def status() -> Any:
    return page_of(Config().admin_path, "/status")


def version() -> str:
    page: Any = page_of(Config().admin_path, "/interface")
    return str(page["version"])


def main_process() -> int:
    command = ["systemctl", "show", "--value", "-p", "MainPID", "topoproxy.service"]
    return int(subprocess.check_output(command, text=True))


def configure() -> None:
    """Write the configuration of an operator, and longer time limits for an emulated machine."""
    Path("/etc/topoproxy").mkdir(exist_ok=True)
    Path("/etc/topoproxy/config.yaml").write_text(yaml.safe_dump(SETTINGS))
    drop_in = Path("/etc/systemd/system/topoproxy.service.d")
    drop_in.mkdir(parents=True)
    (drop_in / "90-slow.conf").write_text(LONG_TIME_LIMITS)
    subprocess.run(["systemctl", "daemon-reload"], check=True)


class CallStream:
    """A thread that makes kubelet's calls, one after the other, within the block."""

    def __init__(self) -> None:
        self.made, self.failed, self.longest = 0, list[str](), 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with Cri(SOCKET, "") as client:
            while not self._end.is_set():
                begin = time.monotonic()
                try:
                    client.list()
                except grpc.RpcError as error:
                    self.failed.append(str(error)[:300])
                self.made, self.longest = self.made + 1, max(self.longest, time.monotonic() - begin)
                self._end.wait(0.2)

    def __enter__(self) -> CallStream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def upgrade(node: KubeletNode, directory: str, expected: str) -> None:
    """Install another version during a stream of calls."""
    ids, former = node.ids(), main_process()
    owner = [row["cpus"] for row in status()["exclusive"]]
    with CallStream() as calls:
        shell(f"dpkg --force-downgrade --install /in/{directory}/*.deb")
        wait("the other version", lambda: main_process() not in (0, former))
        wait("the daemon to be ready", lambda: bool(status()["ready"]))
    assert version() == expected
    assert calls.failed == []
    assert calls.made > 3
    assert node.ids() == ids
    assert [row["cpus"] for row in status()["exclusive"]] == owner
    restarts = ["systemctl", "show", "--value", "-p", "NRestarts", "topoproxy.service"]
    assert subprocess.check_output(restarts, text=True).strip() == "0"
    wait("the former process to end", lambda: not Path(f"/proc/{former}").exists())
    wait("kubelet to call", lambda: any(c["last_s"] is not None for c in status()["calls"]["clients"]))
    step(f"{expected} runs: {calls.made} calls, none failed, the longest took {calls.longest:.1f} s")


def check_attached_node(node: KubeletNode) -> None:
    """Check an attached node: kubelet's calls arrive, and an owner has its CPUs exclusively."""
    page = status()
    assert page["calls"]["clients"], page["calls"]
    node.add("late", container("main", "1"))
    late = node.place("late/main", 2 * LONG_S)
    assert len(late.cpus) == 1, late
    wait("other containers to leave", lambda: node.place("part/main").cpus.isdisjoint(late.cpus))


def attach_to_wrong_runtime(before: list[str]) -> None:
    """An attach with another runtime than kubelet's fails, and is undone completely."""
    config = Path("/etc/topoproxy/config.yaml")
    right = config.read_text()
    config.write_text(yaml.safe_dump({**SETTINGS, "runtime": "unix:///run/other.sock"}))
    output = shell("topoproxy attach --yes", check=False)
    assert "all changes were rolled back" in output
    assert "set runtime in topoproxy's configuration" in output
    assert not Path("/var/lib/topoproxy/attach").exists()
    assert [line for line in list_files() if "/var/lib/kubelet" in line] == [
        line for line in before if "/var/lib/kubelet" in line
    ]
    config.write_text(right)


def by_hand(node: KubeletNode, before: list[str]) -> None:
    install, attach, look = readme_commands()
    os.chdir("/in/old")
    shell(install)
    configure()
    attach_to_wrong_runtime(before)
    shell(attach)
    shell(look)
    old = version()
    check_attached_node(node)
    upgrade(node, "new", "99.0.0")
    upgrade(node, "old", old)
    ids, former = node.ids(), main_process()
    subprocess.run(["systemctl", "kill", "-s", "KILL", "--kill-whom=main", "topoproxy"], check=True)
    wait("systemd to restart the daemon", lambda: main_process() not in (0, former))
    shell(look)
    assert node.ids() == ids
    step("killed: the same containers in the same places")
    assert "cannot be removed while kubelet is attached" in shell("dpkg --purge topoproxy", check=False)
    shell("topoproxy detach --yes --timeout 300")
    wait("kubelet to answer", lambda: answers(node), LONG_S)
    shell("dpkg --purge topoproxy")
    assert node.ids() == ids
    (MANIFESTS / "late.yaml").unlink()
    check_files_unchanged(before, list_files(), "after detach and purge")


def by_chart(node: KubeletNode, before: list[str]) -> None:
    """Run the installer of the chart, without its container and at an imitated API server."""
    leases = Leases()
    threading.Thread(target=leases.server.serve_forever, daemon=True).start()
    scripts = Path("/run/installer")
    shutil.copytree("/in/chart", scripts)
    (scripts / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
    variables = {
        "HOST": "",
        "PACKAGES": "/in/old",
        "SCRIPTS": str(scripts),
        "READY": "/run/installer/ready",
        "PYTHON": "/usr/bin/python3",
        "NODE_NAME": "bed",
        "TURN": "kube-system/turn",
        "TURN_SECONDS": "900",
        "TURN_API": f"http://127.0.0.1:{leases.server.server_port}",
        "ATTACH_TIMEOUT": "300",
        "ONCE": "yes",
    }
    assignments = " ".join(f"{key}={value}" for key, value in variables.items())
    for state in ("attached", "attached", "absent"):
        shell(f"{assignments} sh {scripts}/node.sh {state}")
        assert leases.holder == "", "the lease is released"
        if state == "attached":
            assert status()["ready"] is True
            assert status()["calls"]["clients"]
    wait("kubelet to answer", lambda: answers(node), LONG_S)
    leases.server.shutdown()
    check_files_unchanged(before, list_files(), "after the installer of the chart")


def main() -> None:
    step(f"CPUs {ALL}")
    node = make_node(sys.argv[2])
    before = list_files()
    assert len(before) > 1000
    {"hand": by_hand, "chart": by_chart}[sys.argv[1]](node, before)
    step("the scenario ends well")


if __name__ == "__main__":
    try:
        main()
    finally:
        save_journals(topoproxy="proxy.log", kubelet="kubelet.log")
