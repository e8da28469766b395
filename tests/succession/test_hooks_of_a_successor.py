"""Hooks of a daemon that is replaced by another process: their changes are in effect in the successor."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from proxy.demo.client import DemoPod, StartedPod
from proxy.upgrade.replacement import replace_daemon
from tests.succession.conftest import LIMIT_S, ProcessNode

REPARENTING_HOOK = """
import json
from pathlib import Path

from proxy.hooks.api import Adjustment

API_VERSION = 1
RECORD = Path({record!r})

def note(*values):
    with RECORD.open("a") as record:
        record.write(json.dumps(values) + "\\n")

def configure(event):
    note("configure")

def synchronize(event):
    note("synchronize", *sorted(pod.name for pod in event.pods))

def pre_run_pod_sandbox(event):
    parent = event.pod.cgroup_parent.replace("/burstable/", "/besteffort/")
    return Adjustment(labels={{"koordinator.sh/qosClass": "BE", "site": "north"}}, cgroup_parent=parent)

def post_run_pod_sandbox(event):
    note("ran", event.pod.name, event.pod.labels.get("site", ""))

def pre_create_container(event):
    note("create", event.pod.name, event.pod.labels.get("site", ""), event.decision.pool)

def shutdown(event):
    note("shutdown", event.reason)
"""


DIRECTORIES = {"directory": "hooks.d", "vendorDirectory": "vendor", "serverDirectory": "servers"}


def install_file(node: ProcessNode, name: str, text: str, directory: str = "hooks.d") -> None:
    """Install a file atomically, as packages do."""
    into = node.directory / directory
    into.mkdir(mode=0o755, exist_ok=True)
    temporary = node.directory / f".{name}"
    temporary.write_text(text)
    temporary.chmod(0o644)
    os.replace(temporary, into / name)


def install_hook(node: ProcessNode, text: str, **names: str) -> Path:
    """Give the daemon a hook; return the file in which the hook records its calls."""
    record = node.directory / "record"
    install_file(node, "10-hook.py", text.format(record=str(record), **names))
    lines = [f"  {key}: {node.directory / name}" for key, name in DIRECTORIES.items()]
    node.configure("\n".join(["drainTimeout: 100ms", "hooks:", *lines]))
    os.kill(node.popen.pid, signal.SIGHUP)
    node.wait(lambda: "hook loaded" in node.log)  # configure ends before the hook is in use
    return record


def recorded_names(node: ProcessNode) -> list[str]:
    """Return the first value of each recorded call."""
    return [note[0] for note in recorded_calls(node)]


def recorded_calls(node: ProcessNode) -> list[list[str]]:
    """Return the calls that the hook has recorded, in the old process and in the new one."""
    record = node.directory / "record"
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


@pytest.mark.parametrize("listed", [True, False])
def test_changes_of_a_sandbox_by_a_hook_survive_a_replacement_of_the_daemon(
    node: ProcessNode, *, listed: bool
) -> None:
    """The response passes through the old process; kubelet's creates still name the old labels and cgroup."""
    install_hook(node, REPARENTING_HOOK)
    slow, made = threading.Event(), list[StartedPod]()
    node.runtime.before("RunPodSandbox", lambda request: slow.wait(LIMIT_S))
    with node.client() as client:
        making = threading.Thread(target=lambda: made.append(client.run_pod(DemoPod("web", "LS"))))
        making.start()
        node.wait(lambda: any(call.method == "RunPodSandbox" for call in node.runtime.calls))
        replace_daemon(node.admin, LIMIT_S)
        node.wait(lambda: recorded_calls(node)[-3:] == [["shutdown", "stop"], ["configure"], ["synchronize"]])
        slow.set()
        making.join(LIMIT_S)
    if listed:
        node.wait(lambda: "ran" in recorded_names(node))
    with node.client() as client:
        client.create(made[0])
        client.start(made[0].container_id)
    (create,) = [call.request for call in node.runtime.calls if call.method == "CreateContainer"]
    assert "/besteffort/" in create.sandbox_config.linux.cgroup_parent
    expected = [["create", "web", "north", "be"], ["ran", "web", "north"]]
    node.wait(lambda: sorted(recorded_calls(node)[-2:]) == expected)
