"""Nodes on disk with a daemon, the stand-in runtime and kubelet's files: only the planted fault is found."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.backends.ledger.file_ledger import LEDGER_FILE
from proxy.backends.ledger.format import header
from proxy.config.cluster_config import FILE_NAME
from proxy.config.load import load, parse
from proxy.demo.client import DemoPod
from proxy.doctor.checks import CHECKS, EARLIEST_CLOCK_S, CheckResult, examine
from proxy.doctor.gather import NodePaths, gather
from proxy.model.errors import ConfigError
from proxy.topology.sysfs_writer import write_sysfs
from tests.testkit.daemon import DaemonNode, run, temporary_node

THEIRS = "unix:///run/containerd/containerd.sock"
AVC = (
    'type=AVC msg=audit(1795000000.123:456): avc:  denied  {{ write }} for  pid=812 comm="{}" name="{}"'
    ' dev="cgroup2"'
    " ino=77 scontext=system_u:system_r:container_t:s0 tcontext=system_u:object_r:cgroup_t:s0 tclass=file"
    " permissive=0\n"
)
"""As the audit daemon of Fedora writes what SELinux denies."""
LIMITS = "Limit            Soft Limit  Hard Limit  Units\nMax open files   {}        4096        files\n"


class DoctoredNode(DaemonNode):
    """A healthy node, until a test breaks something."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, version=2)
        write_sysfs(self.machine, directory / "machine")
        for name in ("hooks.d", "kubelet", "proc", "state"):
            (directory / name).mkdir()
        (directory / "state").chmod(0o700)
        (directory / "nri").mkdir()
        none = directory / "none"
        self.settings = (
            f"sysfsRoot: {directory}/machine/sys\n"
            f"procfsRoot: {directory}/proc\n"
            f"cgroupRoot: {directory}/cgroup\n"
            f"hooks: {{directory: {directory}/hooks.d, vendorDirectory: {none}, serverDirectory: {none}}}\n"
            f"kubelet: {{stateDir: {directory}/kubelet}}\n"
        )
        self.write("kubelet/config.yaml", f"containerRuntimeEndpoint: unix://{directory}/cri.sock\n")
        self.write(f"proc/{os.getpid()}/limits", LIMITS.format(2048))
        self.write("audit.log", "type=SERVICE_START unit=topoproxy\n")
        self.use_runc("1.1.6")
        self.more = ""
        """More lines of the configuration that the doctor reads."""
        self.now = EARLIEST_CLOCK_S + 1.0

    def write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)
        return path

    def use_drop_ins(self, endpoint: str) -> None:
        """Make kubelet run with a directory of drop-ins, of which the last one names an endpoint."""
        self.process(7, "kubelet", "/usr/bin/kubelet", "--config-dir", str(self.directory / "kubelet.conf.d"))
        self.write(
            "kubelet.conf.d/10-ours.conf", f"containerRuntimeEndpoint: unix://{self.directory}/cri.sock\n"
        )
        self.write("kubelet.conf.d/20-theirs.conf", f"containerRuntimeEndpoint: {endpoint}\n")

    def use_runc(self, version: str) -> None:
        self.write("runc", f"#!/bin/sh\necho runc version {version}\necho commit: x\n").chmod(0o700)

    def use_certificate(self, text: str) -> None:
        """Make the configuration of the doctor name a certificate."""
        path = self.write("c.pem", text)
        more = f"/kubelet, pods: 'https://127.0.0.1:1', certFile: {path}, keyFile: {path}}}"
        self.settings = self.settings.replace("/kubelet}", more)

    def process(self, pid: int, comm: str, *args: str) -> None:
        self.write(f"proc/{pid}/comm", f"{comm}\n")
        self.write(f"proc/{pid}/cmdline", "\0".join(args))

    def findings(self) -> dict[str, tuple[str, str]]:
        """Return the findings that are not ok: check to result and text."""
        refused = ""
        try:
            config = load(self.write("doctor.yaml", self.configuration(self.more)))
        except ConfigError as error:
            config, refused = parse(self.configuration(), "test"), str(error)
        audit, runc = self.directory / "audit.log", (self.directory / "none", self.directory / "runc")
        paths = NodePaths(self.directory / "nri", audit, runc, lambda: self.now)
        return {
            each.id: (each.result.value, each.text)
            for each in examine(gather(replace(config, origin=None), refused, 20.0, paths))
            if each.result is not CheckResult.OK
        }


NOT_MADE = {
    "cgroup-driver": ("skip", "kubelet's configuration does not name the cgroup driver"),
    "certificates": ("skip", "the configuration names no certificate"),
}


def examined(
    break_it: Callable[[DoctoredNode], object], *, connected: bool = True
) -> dict[str, tuple[str, str]]:
    """Run a daemon with a pod, break the node, and return the findings that a healthy node does not have."""
    found: dict[str, tuple[str, str]] = {}
    with temporary_node(DoctoredNode) as node:

        async def scenario() -> None:
            await node.launch(DemoPod("web", "LS"))
            with node.client() as client:
                if connected:
                    await asyncio.to_thread(client.version)
                break_it(node)
                found.update(await asyncio.to_thread(node.findings))

        run(node.daemon(), scenario, reconciled=True)
    return {name: each for name, each in found.items() if NOT_MADE.get(name) != each}


def test_a_healthy_node_has_no_finding() -> None:
    assert examined(lambda node: None) == {}


def test_the_group_of_the_runtime_may_use_the_socket() -> None:
    assert examined(lambda node: (node.directory / "cri.sock").chmod(0o660)) == {}


WHOLE_CORES = "cpuManagerPolicy: static\ncpuManagerPolicyOptions: {full-pcpus-only: true}"
BROKEN: dict[str, tuple[str, str, Callable[[DoctoredNode], object]]] = {
    "kubeadm-reset": (
        "kubelet-endpoint",
        "fail",
        lambda node: node.write("kubelet/config.yaml", f"containerRuntimeEndpoint: {THEIRS}\n"),
    ),
    "flag-elsewhere": (
        "kubelet-endpoint",
        "fail",
        lambda node: node.process(
            7, "kubelet", "/usr/bin/kubelet", "--v=2", f"--container-runtime-endpoint={THEIRS}"
        ),
    ),
    "drop-in-elsewhere": ("kubelet-endpoint", "fail", lambda node: node.use_drop_ins(THEIRS)),
    "damaged-journal": (
        "attach-journal",
        "fail",
        lambda node: node.write("state/attach/state", "attached\n"),
    ),
    "old-runc": ("runtime-version", "warn", lambda node: node.use_runc("1.1.5")),
    "denied": (
        "denials",
        "warn",
        lambda node: node.write("audit.log", 'type=AVC apparmor="DENIED" profile="topoproxy" name="/x"\n'),
    ),
    "denied-by-selinux": (
        "denials",
        "warn",
        lambda node: node.write(
            "audit.log", f"{AVC.format('sshd', 'x')}{AVC.format('topoproxy', 'cpuset.cpus')}"
        ),
    ),
    "static-kubelet": (
        "kubelet-managers",
        "warn",
        lambda node: node.write("kubelet/cpu_manager_state", '{"policyName":"static","entries":{}}'),
    ),
    "koordlet": ("other-writers", "warn", lambda node: node.process(8, "koordlet", "koordlet")),
    "nri-plugin": ("other-writers", "warn", lambda node: node.write("nri/10-balloons", "")),
    "open-hook": (
        "hook-files",
        "fail",
        lambda node: node.write("hooks.d/10-open.py", "API_VERSION = 1\n").chmod(0o666),
    ),
    "hook-of-another-version": (
        "hook-files",
        "fail",
        lambda node: node.write("hooks.d/10-next.py", "API_VERSION = 2\nraise SystemExit\n"),
    ),
    "hook-with-a-fault": ("hook-files", "fail", lambda node: node.write("hooks.d/10-fault.py", "def\n")),
    "few-files": (
        "open-files",
        "fail",
        lambda node: node.write(f"proc/{os.getpid()}/limits", LIMITS.format(256)),
    ),
    "damaged-before": ("ledger", "warn", lambda node: node.write(f"state/{LEDGER_FILE}.bad-1", "")),
    "open-socket": ("socket-modes", "fail", lambda node: (node.directory / "cri.sock").chmod(0o666)),
    "no-clock": ("clock", "fail", lambda node: setattr(node, "now", 60.0)),
    "wrong-key": ("configuration", "fail", lambda node: setattr(node, "more", "mod: observe")),
    "reserved-too-much": ("machine", "fail", lambda node: setattr(node, "more", "reservedSystemCPUs: 0-99")),
    "reserved-half-a-core": (
        "machine",
        "warn",
        lambda node: setattr(node, "more", f"{WHOLE_CORES}\nreservedSystemCPUs: 0"),
    ),
    "no-certificate": (
        "certificates",
        "fail",
        lambda node: node.use_certificate("not a certificate"),
    ),
}


def test_what_is_denied_to_others_is_not_ours() -> None:
    assert examined(lambda node: node.write("audit.log", AVC.format("sshd", "x"))) == {}


def test_a_file_that_the_flag_of_kubelet_overrides_is_no_fault() -> None:
    def set_flag(node: DoctoredNode) -> None:
        flag = f"--container-runtime-endpoint=unix://{node.directory}/cri.sock"
        node.write("kubelet/kubeadm-flags.env", f'KUBELET_KUBEADM_ARGS="{flag}"\n')
        node.write("kubelet/config.yaml", f"containerRuntimeEndpoint: {THEIRS}\n")

    assert examined(set_flag) == {}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_node_is_named(name: str) -> None:
    check, result, break_it = BROKEN[name]
    found = examined(break_it)
    if check == "hook-files":
        found.pop("daemon-problems", None)  # the daemon reports the file too, once it has read the directory
    assert {each: outcome for each, (outcome, _) in found.items()} == {check: result}


def test_a_runtime_that_is_down_is_named() -> None:
    found = examined(lambda node: node.runtime.stop())
    assert found["runtime"][0] == "fail"
    related = {"runtime-version", "daemon", "daemon-problems", "cgroup-driver", "kubelet-calls"}
    assert set(found) <= {"runtime", *related}


def test_the_node_is_examined_without_the_daemon() -> None:
    with temporary_node(DoctoredNode) as node:
        found = node.findings()
    assert {name: result for name, (result, _) in found.items()} == {
        "cgroup-driver": "skip",
        "daemon": "fail",
        "kubelet-calls": "skip",
        "daemon-problems": "skip",
        "open-files": "skip",
        "ledger": "skip",
        "socket-modes": "skip",
        "certificates": "skip",
    }
    assert "no process listens there" in found["daemon"][1]


def test_a_ledger_of_another_machine_is_named_before_the_daemon_starts() -> None:
    with temporary_node(DoctoredNode) as node:
        node.write(f"state/{LEDGER_FILE}", "not a ledger\n")
        result, text = node.findings()["ledger"]
        assert (result, text.rpartition(": ")[2]) == ("fail", "its first line is damaged")
        (node.directory / "state" / LEDGER_FILE).write_bytes(header("another"))
        assert "it belongs to another machine (another, this one is" in node.findings()["ledger"][1]
        (node.directory / "state" / LEDGER_FILE).write_bytes(header(node.machine.fingerprint))
        assert "ledger" not in node.findings()


def test_a_v2_hierarchy_without_the_controller_for_pods_is_named(tmp_path: Path) -> None:
    with temporary_node(DoctoredNode) as node:
        tree = node.directory / "v2"
        (tree / "kubepods.slice").mkdir(parents=True)
        (tree / "cgroup.controllers").write_text("cpuset cpu memory\n")
        control = tree / "kubepods.slice/cgroup.subtree_control"
        node.settings = node.settings.replace(f"{node.directory}/cgroup", str(tree))
        control.write_text("cpuset cpu\n")
        assert "cgroup-cpuset" not in node.findings()
        control.write_text("cpu memory\n")
        text = "the cpuset controller is not enabled for the groups in /kubepods.slice"
        assert node.findings()["cgroup-cpuset"] == ("fail", text)
        (tree / "cgroup.controllers").unlink()
        result, text = node.findings()["cgroup-cpuset"]
        assert (result, text[:33]) == ("fail", "cannot find the cpuset controller")


def test_a_directory_that_may_not_be_searched_is_the_result_of_its_checks_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deny(node: DoctoredNode) -> None:
        stat = Path.stat

        def denied(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
            if path in (node.directory / "kubelet", node.directory / "state"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return stat(path, follow_symlinks=follow_symlinks)

        monkeypatch.setattr(Path, "stat", denied)

    found = examined(deny)
    assert set(found) == {"cgroup-driver", "kubelet-endpoint", "kubelet-managers", "disk", "ledger"}
    for name, (result, text) in found.items():
        directory = "state" if name in ("disk", "ledger") else "kubelet"
        assert result == "warn"
        assert re.fullmatch(f"cannot read .*/{directory}: Permission denied", text)


@pytest.mark.parametrize(
    "name",
    [
        *("kubelet/config.yaml", "kubelet/kubeadm-flags.env", "kubelet/instance-config.yaml"),
        *("kubelet/cpu_manager_state", "kubelet/memory_manager_state", "kubelet.conf.d/20-theirs.conf"),
    ],
)
def test_a_file_of_kubelet_that_may_not_be_read_is_not_taken_for_missing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def deny(node: DoctoredNode) -> None:
        open_file, denied = os.open, str(node.directory / name)
        node.use_drop_ins(f"unix://{node.directory}/cri.sock")

        def opened(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if path == denied:
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return open_file(path, flags, mode, dir_fd=dir_fd)

        monkeypatch.setattr("proxy.backends.kubelet.small_file.os.open", opened)

    found = examined(deny)
    assert set(found) == {"cgroup-driver", "kubelet-endpoint", "kubelet-managers"}
    for result, text in found.values():
        assert result == "warn"
        assert re.fullmatch(f"cannot read .*/{name}: Permission denied", text)


@pytest.mark.parametrize(
    ("denied", "check"),
    [("state", "ledger"), ("state/ledger.jsonl", "ledger"), ("state/attach/complete", "attach-journal")],
)
def test_what_only_root_may_read_in_the_state_directory_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, denied: str, check: str
) -> None:
    def deny(node: DoctoredNode) -> None:
        path = node.directory / denied
        if "attach" in denied:
            path.parent.mkdir()

        def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(name: Path | str, *args: Any, **more: Any) -> Any:
                if Path(name) == path:
                    raise PermissionError(errno.EACCES, "Permission denied", str(name))
                return real(name, *args, **more)

            return call

        monkeypatch.setattr(Path, "iterdir", guarded(Path.iterdir))
        monkeypatch.setattr(Path, "read_bytes", guarded(Path.read_bytes))
        monkeypatch.setattr("proxy.backends.kubelet.small_file.os.open", guarded(os.open))

    found = examined(deny)
    assert set(found) == {check}
    result, text = found[check]
    assert result == "warn"
    assert re.fullmatch("cannot read .*: Permission denied", text)


def test_sockets_that_this_user_may_not_use_are_not_taken_for_processes_that_are_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deny(node: DoctoredNode) -> None:
        connect = socket.socket.connect
        denied = {str(node.directory / name): name for name in ("runtime.sock", "admin.sock")}

        def connecting(self: socket.socket, path: str) -> None:
            if path in denied:
                raise PermissionError(errno.EACCES, "Permission denied")
            connect(self, path)

        node.runtime.stop()  # gRPC connects without Python
        monkeypatch.setattr(socket.socket, "connect", connecting)

    found = examined(deny)
    of_daemon, of_runtime = (
        {"daemon", "kubelet-calls", "daemon-problems", "open-files"},
        {"runtime", "runtime-version"},
    )
    assert set(found) == of_daemon | of_runtime
    for name, (result, text) in found.items():
        process, path = ("daemon", "admin") if name in of_daemon else ("runtime", "runtime")
        assert result == "warn"
        assert re.match(f"cannot query the {process} at .*/{path}.sock: Permission denied", text)


def test_settings_from_the_cluster_that_the_machine_cannot_meet_are_no_fault_of_the_nodes_own() -> None:
    def name_missing_cpus(node: DoctoredNode) -> None:
        cluster = node.directory / "cluster"
        cluster.mkdir(mode=0o700)
        (cluster / FILE_NAME).write_text("reservedSystemCPUs: 900\n")
        node.more = (
            f"clusterFacts: {{directory: {cluster}}}\nclusterConfig: {{allowed: [reservedSystemCPUs]}}\n"
        )

    found = examined(name_missing_cpus)
    assert set(found) == {"configuration"}
    result, text = found["configuration"]
    assert result == "warn"
    assert text.startswith("the settings from the cluster are ignored: ")
    assert "reservedSystemCPUs" in text


def test_a_fault_of_a_check_is_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHECKS, "clock", lambda facts: facts.nothing)
    monkeypatch.setattr("proxy.doctor.gather.scan_directories", lambda config: config.nothing)
    found = examined(lambda node: None)
    assert set(found) == {"clock", "hook-files"}
    assert found["clock"][0] == "fail"
    assert found["clock"][1].startswith("cannot make this check: internal error: AttributeError: ")
    assert found["hook-files"][0] == "fail"
    assert found["hook-files"][1].startswith("cannot make this check: internal error: AttributeError: ")
