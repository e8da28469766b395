"""The scenario of attach and detach: a real kubelet in each layout, and attaches that fail.

kubelet runs as a unit, and a pod runs all the time. In each layout kubelet's calls must arrive, and after the
detach every file must be as before. If the runtime is down or kubelet fails, an attach undoes itself within
its deadline and reports the cause. The last attach is undone without topoproxy and Python.

    python3 vm_attach.py [LAYOUT...] systemd

Needs /in/kubelet (1.34 or later), /in/systemd (the shipped units) and leases.py in /in/chart.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import grpc
from vm_guest import LONG_S, RUNTIME, save_journals, step, wait
from vm_kubelet import MANIFESTS, ROOT, KubeletNode, container, kubelet_settings
from vm_node import (
    ENDPOINT,
    KUBEADM,
    SETTINGS,
    UNITS,
    answers,
    check_files_unchanged,
    list_files,
    shell,
    status,
)
from vm_unit import CONFIG, install, systemctl

START = "[Service]\nExecStart={}\nRestart=always\nRestartSec=3\n[Install]\nWantedBy=multi-user.target\n"
HEAD = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
COMMAND, CONFIG_FILE = "/in/kubelet --hostname-override=bed --v=2", ROOT / "config.yaml"
UNIT, KUBEADM_DROP_IN = UNITS / "kubelet.service", UNITS / "kubelet.service.d/10-kubeadm.conf"
DROP_INS = Path("/etc/kubelet.conf.d")
HARDENED = Path("/etc/systemd/system/kubelet.service.d/50-hardened.conf")
STATE = Path("/var/lib/topoproxy")
LONG_ATTACH_S = 300
"""For attaches that succeed: in a virtual machine on a busy host, kubelet may take more than a minute."""
DEADLINE_S = 90
STOP_S = 60
"""What a stop of topoproxy's units may take beyond the deadline: ``TimeoutStopSec``; see docs/attach.md."""


def settings(driver: str, **more: object) -> str:
    """Return kubelet's configuration, without an endpoint unless ``more`` has one."""
    values = kubelet_settings(driver, signed=False) | {
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "featureGates": {},
    }
    del values["containerRuntimeEndpoint"]
    return json.dumps(values | more, indent=1)


def layouts(driver: str) -> Mapping[str, tuple[Mapping[Path, str], list[str]]]:
    """Return kubelet's files in each layout, and the files that an attach changes or creates."""
    named = settings(driver, containerRuntimeEndpoint=ENDPOINT)
    flag = f"--container-runtime-endpoint={ENDPOINT}"
    kubeadm = {UNIT: START.format("/in/kubelet"), KUBEADM_DROP_IN: KUBEADM}
    flags, instance, json_file = (
        ROOT / "kubeadm-flags.env",
        ROOT / "instance-config.yaml",
        Path("/etc/kubelet.json"),
    )
    drop_in = DROP_INS / "20-more.d/10-cri.conf"
    return {
        "kubeadm-flags.env": (
            {
                **kubeadm,
                CONFIG_FILE: settings(driver, containerRuntimeEndpoint=""),
                flags: f'KUBELET_KUBEADM_ARGS="--hostname-override=bed {flag} --v=2"\n',
            },
            [str(flags)],
        ),
        "instance-config.yaml": (
            {
                **kubeadm,
                CONFIG_FILE: named,
                instance: f'containerRuntimeEndpoint: "{ENDPOINT}"\n',
                flags: 'KUBELET_KUBEADM_ARGS="--hostname-override=bed --v=2"\n',
            },
            [str(CONFIG_FILE), str(instance)],
        ),
        "configuration file": (
            {UNIT: START.format(f"{COMMAND} \\\n  --config={json_file}"), json_file: named},
            [str(json_file)],
        ),
        "drop-in directory": (
            {
                UNIT: START.format(f"{COMMAND} --config {CONFIG_FILE} --config-dir={DROP_INS}"),
                CONFIG_FILE: named,
                DROP_INS / "10-base.conf": f"{HEAD}containerRuntimeEndpoint: unix:///nowhere\n",
                drop_in: f"{HEAD}containerRuntimeEndpoint: '{ENDPOINT}'\n",
                DROP_INS / "30-other.conf": f"{HEAD}maxPods: 9\n",
            },
            [str(drop_in)],
        ),
        "flag in the unit": (
            {
                UNIT: START.format(f"{COMMAND} \\\n  {flag} \\\n  --config={CONFIG_FILE}"),
                CONFIG_FILE: settings(driver, containerRuntimeEndpoint="unix:///nowhere"),
            },
            ["/etc/systemd/system/kubelet.service.d/zz-topoproxy.conf"],
        ),
    }


def main_process(unit: str) -> int:
    return int(systemctl("show", "--value", "-p", "MainPID", unit))


@contextmanager
def kubelet_in_layout(node: KubeletNode, content: Mapping[Path, str]) -> Iterator[list[str]]:
    """Run kubelet in a layout; gives the list of files. At the end the layout's files are removed."""
    for path, text in content.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    systemctl("daemon-reload")
    systemctl("restart", "kubelet")
    wait("kubelet to answer", lambda: answers(node), LONG_S)
    yield node_files()
    for path in content:
        path.unlink()


def calls_arrive(name: str) -> None:
    """Check that the daemon receives calls of kubelet's process."""
    page, kubelet = status(), main_process("kubelet.service")
    calls = [client for client in page["calls"]["clients"] if client["pid"] == kubelet]
    assert calls, page["calls"]
    assert calls[0]["last_s"] is not None, page["calls"]
    step(f"{name}: the calls of kubelet ({kubelet}) arrive")


def a_pod_is_placed(node: KubeletNode) -> None:
    node.add("late", container("main", "1"))
    late = node.place("late/main", 2 * LONG_S)
    owners = {row["cpus"] for row in status()["exclusive"]}
    assert (len(late.cpus), owners) == (1, {str(late.cpus)}), (late, owners)
    (MANIFESTS / "late.yaml").unlink()
    wait("the pod to end", lambda: "late/main" not in node.ids(), 2 * LONG_S)
    step(f"a new pod had CPU {late.cpus} exclusively")


def node_files() -> list[str]:
    """List the files of the node, without topoproxy's installed configuration."""
    return [line for line in list_files() if line.startswith("/") and not line.startswith("/etc/topoproxy/")]


def changed(before: list[str]) -> set[str]:
    """Return kubelet's files that differ or are new, without the links that enable topoproxy's units."""
    known = set(before)
    different = {line.split(" ", 1)[0] for line in node_files() if line not in known}
    return {path for path in different if ".wants" not in path and not path.endswith(".d")}


def check_detached(node: KubeletNode, before: list[str], ids: Mapping[str, str], name: str) -> None:
    wait("kubelet to answer", lambda: answers(node), LONG_S)
    assert subprocess.run(["systemctl", "is-active", "--quiet", "topoproxy.service"], check=False).returncode
    wait(f"the same containers ({ids})", lambda: running_ids(node) == ids, LONG_S)
    check_files_unchanged(before, node_files(), name)


def running_ids(node: KubeletNode) -> Mapping[str, str]:
    """Return the containers of the runtime; none while it starts and rejects calls."""
    try:
        return node.ids()
    except grpc.RpcError:
        return {}


def check_attach_fails(*patterns: str) -> None:
    """Check that an attach that cannot succeed is undone in time and reports the cause."""
    command = ["topoproxy", "attach", "--yes", "--timeout", str(DEADLINE_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as attach:
        # On a busy host the start of the command alone may take a minute.
        wait("the attach to begin", (STATE / "rescue-detach").exists)
        begin = time.monotonic()
        output = attach.communicate()[0]
        took = time.monotonic() - begin
    print(output, flush=True)
    assert attach.returncode == 1, output
    for each in (*patterns, f"all changes were rolled back: kubelet uses {ENDPOINT}"):
        assert re.search(each, output), each
    assert took < DEADLINE_S + STOP_S, took
    assert not (STATE / "attach").exists()
    step(f"the attach was undone after {took:.1f} s of {DEADLINE_S}")


def failing_attaches(node: KubeletNode, before: list[str], ids: Mapping[str, str]) -> None:
    kubelet = main_process("kubelet.service")
    # topoproxy's unit would start the runtime (Wants=), so mask it. To stop a masked unit would end its
    # shims.
    systemctl("stop", "containerd")
    systemctl("mask", "--runtime", "containerd")
    check_attach_fails("topoproxy is not ready")
    systemctl("unmask", "--runtime", "containerd")
    systemctl("start", "containerd")
    assert main_process("kubelet.service") == kubelet, "kubelet was not restarted"
    check_detached(node, before, ids, "the runtime was down")
    HARDENED.parent.mkdir(parents=True)
    HARDENED.write_text("[Service]\nInaccessiblePaths=-/run/topoproxy\n")
    systemctl("daemon-reload")
    hardened = node_files()
    check_attach_fails("no calls from kubelet arrived", "[1-9][0-9]* restarts")
    check_detached(node, hardened, ids, "kubelet refused")
    HARDENED.unlink()
    HARDENED.parent.rmdir()
    systemctl("daemon-reload")


def detach_by_rescue_script() -> None:
    """Undo an attach without topoproxy, its daemon and Python."""
    hidden = [*Path("/usr/bin").glob("python3*"), Path("/usr/local/bin/topoproxy")]
    for path in hidden:
        path.rename(path.with_name(f".{path.name}"))
    systemctl("kill", "-s", "KILL", "topoproxy.service")
    try:
        assert "detached: kubelet uses" in shell(str(STATE / "rescue-detach"))
    finally:
        for path in hidden:
            path.with_name(f".{path.name}").rename(path)


def main() -> None:
    *only, driver = sys.argv[1:]
    node = KubeletNode(driver, cast("Any", None))
    for directory in (ROOT, MANIFESTS, Path("/var/log/pods")):
        directory.mkdir(parents=True, exist_ok=True)
    install()
    CONFIG.write_text(json.dumps({**SETTINGS, "runtime": f"unix://{RUNTIME}"}))
    node.add("part", container("main", "250m"))
    chosen = {k: v for k, v in layouts(driver).items() if not only or k.split()[0] in only}
    first, last = next(iter(chosen)), list(chosen)[-1]
    for name, (content, expected) in chosen.items():
        with kubelet_in_layout(node, content) as before:
            wait("the pod to run", lambda: "part/main" in node.ids(), 2 * LONG_S)
            ids = node.ids()
            if name == last:
                failing_attaches(node, before, ids)
            options = f"--timeout {LONG_ATTACH_S}"
            attach = f"topoproxy attach --yes {options}"
            shell(f"sh /in/systemd/bootstrap-node.sh 600 {options}" if name == first else attach)
            assert changed(before) == set(expected), changed(before)
            calls_arrive(name)
            if name == first:
                a_pod_is_placed(node)
            if name == last:
                detach_by_rescue_script()
            else:
                shell("topoproxy detach --yes --timeout 300")
            check_detached(node, before, ids, f"{name}, detached")
    step("the scenario ends well")


if __name__ == "__main__":
    try:
        main()
    finally:
        save_journals(topoproxy="proxy.log", kubelet="kubelet.log")
