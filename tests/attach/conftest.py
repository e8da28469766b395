"""A node under a directory: kubelet's files in one of the layouts, and a stand-in for systemctl."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pytest

from proxy.attach.node import AttachNode
from proxy.attach.state_file import BEGUN, CHANGING
from proxy.model.errors import UnavailableError

OURS = "unix:///run/topoproxy/cri.sock"
RUNTIME = "unix:///run/containerd/containerd.sock"
KUBEADM = """# made by the package
[Service]
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
EnvironmentFile=-/etc/default/kubelet
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS
"""
BARE = "[Service]\nExecStart=/usr/bin/kubelet\nRestart=always\n"
HEAD = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
UNIT, DROP_IN = (
    "usr/lib/systemd/system/kubelet.service",
    "usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf",
)
CONFIG = "var/lib/kubelet/config.yaml"
WITH_ENDPOINT = f"{HEAD}containerRuntimeEndpoint: {RUNTIME} # as joined\nmaxPods: 110\n"
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "kubeadm-flags": {
        UNIT: BARE,
        DROP_IN: KUBEADM,
        CONFIG: f'{HEAD}containerRuntimeEndpoint: ""\n',
        "var/lib/kubelet/kubeadm-flags.env": (
            f'KUBELET_KUBEADM_ARGS="--container-runtime-endpoint={RUNTIME} --v=2"\n'
        ),
    },
    "instance-config": {
        UNIT: BARE,
        DROP_IN: KUBEADM,
        CONFIG: WITH_ENDPOINT,
        "var/lib/kubelet/instance-config.yaml": f'containerRuntimeEndpoint: "{RUNTIME}"\n',
        "var/lib/kubelet/kubeadm-flags.env": 'KUBELET_KUBEADM_ARGS="--v=2"\n',
    },
    "config-file": {
        UNIT: "[Service]\nExecStart=/usr/bin/kubelet \\\n  --config=/etc/kubelet.json \\\n  --v=2\n",
        "etc/kubelet.json": (
            f'{{\n  "kind": "KubeletConfiguration",\n  "containerRuntimeEndpoint": "{RUNTIME}"\n}}'
        ),
    },
    "drop-in-directory": {
        UNIT: f"[Service]\nExecStart=/usr/bin/kubelet --config /{CONFIG} --config-dir=/etc/kubelet.conf.d\n",
        CONFIG: WITH_ENDPOINT,
        "etc/kubelet.conf.d/10-base.conf": f"{HEAD}containerRuntimeEndpoint: unix:///nowhere\n",
        "etc/kubelet.conf.d/20-more.d/10-cri.conf": f"{HEAD}containerRuntimeEndpoint: '{RUNTIME}'\n",
        "etc/kubelet.conf.d/30-other.conf": f"{HEAD}maxPods: 9\n",
    },
    "unit": {
        UNIT: f"[Unit]\nDescription=x\n[Service]\nExecStart=/usr/bin/kubelet --v=2 \\\n"
        f"  --container-runtime-endpoint={RUNTIME} \\\n  --config=/{CONFIG}\nRestart=always\n",
        CONFIG: f"{HEAD}maxPods: 9\n",
    },
}
MICROK8S_RUNTIME = "${SNAP_COMMON}/run/containerd.sock"
EMBEDDED, CRIO = "unix:///run/k3s/containerd/containerd.sock", "unix:///run/crio/crio.sock"
K3S_UNIT = "[Service]\nType=notify\nEnvironmentFile=-/etc/systemd/system/k3s.service.env\nKillMode=process\n"
K3S_UNIT += "Restart=always\nExecStart=/usr/local/bin/k3s \\\n    {} \\\n\n"
RKE2_UNIT = "[Service]\nType=notify\nEnvironmentFile=-/etc/default/%N\nKillMode=process\n"
RKE2_UNIT += "ExecStart=/usr/local/bin/rke2 {}\n"
LOCAL_UNITS, WANTS = "usr/local/lib/systemd/system", "etc/systemd/system/multi-user.target.wants"
K3S_DEFAULTS = "var/lib/rancher/k3s/agent/etc/kubelet.conf.d/00-k3s-defaults.conf"
DISTRIBUTIONS: Mapping[str, Mapping[str, str]] = {
    "microk8s": {
        "var/snap/microk8s/x7/args/kubelet": (
            "--kubeconfig=${SNAP_DATA}/credentials/kubelet.config\n"
            "--root-dir=${SNAP_COMMON}/var/lib/kubelet\n"
            '--eviction-hard="memory.available<100Mi,nodefs.available<1Gi,imagefs.available<1Gi"\n'
            f"--container-runtime-endpoint={MICROK8S_RUNTIME}\n--containerd={MICROK8S_RUNTIME}\n"
            '--node-labels="microk8s.io/cluster=true"\n'
        ),
        "var/snap/microk8s/x7/args/containerd": "--address ${SNAP_COMMON}/run/containerd.sock\n",
    },
    "k3s-server": {
        "etc/systemd/system/k3s.service": K3S_UNIT.format("server"),
        "etc/systemd/system/k3s.service.env": "",
        "etc/rancher/k3s/k3s.yaml": "apiVersion: v1\nkind: Config\n",
        K3S_DEFAULTS: f"{HEAD}containerRuntimeEndpoint: {EMBEDDED}\n",
    },
    "k3s-agent": {
        "etc/systemd/system/k3s-agent.service": K3S_UNIT.format("agent"),
        "etc/rancher/k3s/config.yaml": 'token: x\nkubelet-arg:\n  - "max-pods=250"\n',
        "etc/rancher/k3s/config.yaml.d/10-labels.yaml": "node-label+:\n  - a=b\n",
        "etc/rancher/k3s/config.yaml.d/20-old.yml": "kubelet-arg: [container-runtime-endpoint=unix:///no]\n",
    },
    "k3s-on-crio": {
        "etc/systemd/system/k3s.service": K3S_UNIT.format("server"),
        "etc/rancher/k3s/config.yaml": f'container-runtime-endpoint: "{CRIO}"\n',
    },
    "rke2-server": {
        "usr/lib/systemd/system/rke2-server.service": RKE2_UNIT.format("server"),
        "usr/lib/systemd/system/rke2-agent.service": RKE2_UNIT.format("agent"),
        "etc/rancher/rke2/config.yaml": "# server: https://x:9345\nwrite-kubeconfig-mode: '0644'\n",
    },
    "rke2-agent": {
        f"{LOCAL_UNITS}/rke2-server.service": RKE2_UNIT.format("server"),
        f"{LOCAL_UNITS}/rke2-agent.service": RKE2_UNIT.format("agent"),
        "etc/rancher/rke2/config.yaml": (
            f"server: https://x:9345\nkubelet-arg:\n- container-runtime-endpoint={RUNTIME}\n- v=2\n"
        ),
    },
}
"""The files of an installation of each that are of interest, as upstream's installers make them."""
LINKS = {
    "microk8s": ("var/snap/microk8s/current", "x7"),
    "rke2-agent": (f"{WANTS}/rke2-agent.service", f"../../../../{LOCAL_UNITS}/rke2-agent.service"),
}
"""The revision of a snap that runs; the unit of RKE2 that is enabled."""
RESTARTED = {
    "microk8s": ("snap.microk8s.daemon-kubelite.service", MICROK8S_RUNTIME),
    "k3s-server": ("k3s.service", EMBEDDED),
    "k3s-agent": ("k3s-agent.service", EMBEDDED),
    "k3s-on-crio": ("k3s.service", CRIO),
    "rke2-server": ("rke2-server.service", EMBEDDED),
    "rke2-agent": ("rke2-agent.service", RUNTIME),
}
"""The unit that runs kubelet, and the endpoint before the attach."""
CHANGED = {
    "microk8s": ["/var/snap/microk8s/current/args/kubelet"],
    **{
        f"{kind}-{role}": [f"/etc/rancher/{kind}/config.yaml.d/zz-topoproxy.yaml"]
        for kind, role in (
            *(("k3s", role) for role in ("server", "agent", "on-crio")),
            *(("rke2", role) for role in ("server", "agent")),
        )
    },
    "kubeadm-flags": ["/var/lib/kubelet/kubeadm-flags.env"],
    "instance-config": [f"/{CONFIG}", "/var/lib/kubelet/instance-config.yaml"],
    "config-file": ["/etc/kubelet.json"],
    "drop-in-directory": ["/etc/kubelet.conf.d/20-more.d/10-cri.conf"],
    "unit": ["/etc/systemd/system/kubelet.service.d/zz-topoproxy.conf"],
}
SYSTEMCTL = """#!/bin/sh
# state: one file for each unit that is enabled (on), and that runs (runs); log: the requests.
echo "$*" >>"$FAKE_SYSTEMD/log"
[ "${FAKE_KILL:-}" != "$1" ] || kill -9 "$PPID"
case $1 in
    is-enabled) [ -e "$FAKE_SYSTEMD/on.$2" ] && echo enabled || { echo disabled; exit 1; } ;;
    enable) shift; for unit; do touch "$FAKE_SYSTEMD/on.$unit"; done ;;
    disable)
        shift
        now=
        [ "$1" != --now ] || { now=1; shift; }
        for unit; do rm -f "$FAKE_SYSTEMD/on.$unit" ${now:+"$FAKE_SYSTEMD/runs.$unit"}; done ;;
    stop) shift; for unit; do rm -f "$FAKE_SYSTEMD/runs.$unit"; done ;;
    start)
        [ ! -e "$FAKE_SYSTEMD/no-start" ] || { echo "Job for $2 failed." >&2; exit 1; }
        shift; for unit; do touch "$FAKE_SYSTEMD/runs.$unit"; done ;;
    show)
        if [ "${2#topoproxy.}" != "$2" ]; then
            [ -e "$FAKE_SYSTEMD/runs.$2" ] && echo ActiveState=active || echo ActiveState=inactive
        elif [ -e "$FAKE_SYSTEMD/refuses" ]; then
            printf 'ActiveState=activating\\nSubState=auto-restart\\nResult=exit-code\\nNRestarts=3\\n'
        else
            printf 'MainPID=4242\\nControlGroup=/system.slice/kubelet.service\\n'
            printf 'ActiveState=active\\nSubState=running\\nResult=success\\nNRestarts=0\\n'
        fi ;;
esac
"""


STEP_OF_ATTACH = {
    "enable": "enabled",
    "start": "started",
    "daemon-reload": "reloaded",
    "restart": "restarted",
}
STEP_OF_UNDO = {"restart": "restarted again", "disable": "disabled"}
"""The step that a command of systemctl completes."""


class Killed(BaseException):
    """Raised at the point at which the process is killed."""


@dataclass
class FakeNode:
    """A node.

    Attributes:
        layout: How kubelet is configured.
        root: Used in place of ``/``.
        state: topoproxy's state directory.
        systemd: The files of the stand-in for systemctl.
        calls: Whether kubelet's calls reach the proxy once its configuration names the proxy's socket.
        caller: The process that makes kubelet's calls.
        runtime: The socket to which the daemon forwards calls.
        listening: The socket on which the daemon listens.
        released: Whether the daemon only relays calls.
        raise_after: What is raised after a step, once.
    """

    layout: str
    root: Path
    state: Path
    systemd: Path
    calls: bool = True
    caller: int = 4242
    answers: bool = True
    ready: bool = True
    runtime: str = RUNTIME.removeprefix("unix://")
    listening: str = OURS.removeprefix("unix://")
    released: bool = False
    raise_after: dict[str, BaseException] = field(default_factory=dict)
    reported: list[str] = field(default_factory=list)

    @property
    def log(self) -> list[str]:
        return (self.systemd / "log").read_text().splitlines() if (self.systemd / "log").exists() else []

    def node(self) -> AttachNode:
        proc = self.root / "proc"
        proc.mkdir(exist_ok=True)
        return AttachNode(
            self.root,
            self.state,
            Path("/var/lib/kubelet"),
            proc,
            Path("/run/topoproxy/cri.sock"),
            self.query,
            self.reported.append,
        )

    def reach(self, step: str) -> None:
        if step in self.raise_after:
            raise self.raise_after.pop(step)

    def query(self, route: str, act: bool) -> Mapping[str, object]:
        if not self.answers:
            raise UnavailableError("cannot query the daemon: no process listens there")
        if route.startswith("/release"):
            self.released = {"/release/start": True, "/release/undo": False}.get(route, self.released)
            return {"stage": "released" if self.released else ""}
        uses = self.uses_us() and any(line.startswith("restart ") for line in self.log) and self.calls
        return {
            "ready": self.ready,
            "listen": self.listening,
            "runtime": {"endpoint": self.runtime, "connected": self.ready, "reason": "no socket"},
            "clients": int(uses),
            "calls": {"clients": [{"pid": self.caller, "last_s": 0.0}] if uses else []},
        }

    def uses_us(self) -> bool:
        """Return whether kubelet's configuration names the proxy's socket, by the files of the layout."""
        path = self.root / CHANGED[self.layout][0].lstrip("/")
        return path.is_file() and OURS in path.read_text()

    def hashes(self) -> dict[str, tuple[object, ...]]:
        """Return all files, with content, mode, owner and time."""
        found: dict[str, tuple[object, ...]] = {}
        for directory, _, names in os.walk(self.root):
            found[directory] = ()
            for name in names:
                path = Path(directory, name)
                status = path.lstat()
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                owner = (status.st_uid, status.st_gid, status.st_mtime_ns)
                found[str(path)] = (content, oct(status.st_mode), *owner)
        return found


def report_steps(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report each step of an attach and of its undoing to a node."""
    applied = 0

    def file_step(*_: object) -> str:
        nonlocal applied
        applied += 1
        return f"file {applied}"

    steps: dict[str, Callable[..., str | None]] = {
        "journal.write": lambda _, journal, *rest: "journal" if journal.state == BEGUN else CHANGING,
        "journal.set_stage": lambda _, stage: stage,
        "journal.apply": file_step,
        "journal.restore": lambda *_: "restored",
        "service.systemctl": lambda words, _: STEP_OF_ATTACH.get(words[0]),
        "detach.systemctl": lambda words, _: STEP_OF_UNDO.get(words[0]),
    }
    for name, step_of in steps.items():
        module, _, attribute = name.partition(".")
        function = getattr(import_module(f"proxy.attach.{module}"), attribute)

        def call(
            *args: object,
            function: Callable[..., object] = function,
            step_of: Callable[..., str | None] = step_of,
        ) -> object:
            result = function(*args)
            step = step_of(*args)
            if step == CHANGING:
                nonlocal applied
                applied = 0
            if step:
                node.reach(step)
            return result

        monkeypatch.setattr(f"proxy.attach.{name}", call)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], FakeNode]:
    """Return a function that makes a node of a layout."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "systemctl").write_text(SYSTEMCTL)
    (programs / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SYSTEMD", str(tmp_path / "systemd"))
    (tmp_path / "systemd").mkdir()

    def make(layout: str) -> FakeNode:
        root = tmp_path / "root"
        (root / "proc").mkdir(parents=True)
        (root / "etc/systemd/system").mkdir(parents=True)
        for number, (name, text) in enumerate({**LAYOUTS, **DISTRIBUTIONS}[layout].items()):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o640 if number % 2 else 0o604)
            # Whole seconds: cp of busybox preserves no fractions.
            os.utime(path, (1_700_000_000 + number, 1_700_001_000 + number))
        if layout in LINKS:
            link, target = LINKS[layout]
            (root / link).parent.mkdir(parents=True, exist_ok=True)
            (root / link).symlink_to(target)
        node = FakeNode(layout, root, tmp_path / "state", tmp_path / "systemd")
        report_steps(node, monkeypatch)
        return node

    return make
