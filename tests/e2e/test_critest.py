"""The CRI conformance suite and crictl have the same results directly and through the daemon.

By default a part of the suite runs, which takes seconds; TOPOPROXY_CRITEST=full runs all of it. The same
specs must fail or be skipped in both runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
from cri import cpuset_of, online
from daemon import CPUSET_ANNOTATION, QOS_LABEL, DaemonProcess

if TYPE_CHECKING:
    from private_runtime import PrivateRuntime

from proxy.model.idset import CpuSet

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PART = "|".join(
    (
        *("basic operations on (container|PodSandbox)", "Idempotence", "Multiple Containers", "runtime info"),
        *("Streaming", "NamespaceOption", "support networking", "adding volume"),
    )
)
FULL = os.environ.get("TOPOPROXY_CRITEST") == "full"
UNSTEADY = re.compile("OOMKilled")  # flaky because of an event race in containerd 1.6
LAST = CpuSet([max(online())])


@pytest.fixture(scope="module")
def tools(runtime: PrivateRuntime) -> Path:
    """The directory with critest and crictl."""
    done = subprocess.run(
        ["sh", str(Path(__file__).with_name("build_critest.sh"))], capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    return Path(done.stdout.strip().splitlines()[-1])


def results(
    runtime: PrivateRuntime, tools: Path, socket: Path, directory: Path, focus: str
) -> dict[str, str]:
    """Run the suite; returns the result of each spec by name."""
    directory.mkdir()
    command = [
        *(str(tools / "critest"), f"-runtime-endpoint=unix://{socket}", f"-image-endpoint=unix://{socket}"),
        *(f"-config={directory / 'absent.yaml'}", f"-ginkgo.junit-report={directory / 'junit.xml'}"),
        *("-ginkgo.seed=7", "-ginkgo.no-color", f"-ginkgo.focus={focus}"),
    ]
    done = runtime.run(command, limit=600)
    (directory / "critest.log").write_text(done.stdout)
    found = {}
    for case in ElementTree.parse(directory / "junit.xml").iter("testcase"):
        if case.get("name", "").startswith("[It]"):
            found[case.get("name", "")] = str(case.get("status"))
    return found


def test_the_suite_gives_the_same_results(
    runtime: PrivateRuntime, tools: Path, start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    focus = "" if FULL else PART
    if shutil.which("ipcmk") is None:
        pytest.skip("the suite needs ipcmk (util-linux)")
    direct = results(runtime, tools, runtime.socket, tmp_path / "direct", focus)
    proxied = results(runtime, tools, start_daemon().socket, tmp_path / "proxied", focus)
    differing = {name for name in direct | proxied if direct.get(name) != proxied.get(name)}
    if unsteady := {name for name in differing if UNSTEADY.search(name)}:
        again = results(runtime, tools, runtime.socket, tmp_path / "again", UNSTEADY.pattern)
        assert again, unsteady
        differing -= unsteady
    tally = Counter(direct.values())
    print(f"of {len(direct)} specs, directly at the runtime: {dict(tally)}; {len(differing)} differ")
    assert not differing, {name: (direct.get(name), proxied.get(name)) for name in differing}
    assert tally["passed"] >= (80 if FULL else 25), tally


def test_crictl_runs_a_pod_through_the_daemon(
    runtime: PrivateRuntime, tools: Path, start_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    daemon = start_daemon()

    def crictl(*args: str) -> str:
        endpoint = f"unix://{daemon.socket}"
        done = runtime.run([str(tools / "crictl"), "-r", endpoint, "-i", endpoint, "-t", "20s", *args])
        assert done.returncode == 0, done.stdout
        return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""

    pod_file, container_file = tmp_path / "pod.json", tmp_path / "container.json"
    pod_config = {
        "metadata": {"name": "ctl", "uid": "uid-ctl", "namespace": "default", "attempt": 0},
        "labels": {QOS_LABEL: "LSE"},
        "annotations": {CPUSET_ANNOTATION: json.dumps({"cpuset": str(LAST)})},
        "linux": {"cgroup_parent": f"{runtime.cgroup}/kubepods/pod-ctl"},
    }
    container_config = {
        "metadata": {"name": "main"},
        "image": {"image": "localhost/busybox:1"},
        "command": ["sleep", "3600"],
        "linux": {"resources": {"cpu_shares": 1024}},
    }
    pod_file.write_text(json.dumps(pod_config))
    container_file.write_text(json.dumps(container_config))

    pod = crictl("runp", str(pod_file))
    container = crictl("create", pod, str(container_file), str(pod_file))
    crictl("start", container)
    assert cpuset_of(container).cpus == LAST
    crictl("update", "--cpu-quota", "50000", container)
    assert cpuset_of(container).cpus == LAST
    assert crictl("exec", container, "echo", "output").endswith("output")
    assert crictl("exec", "-s", container, "nproc") == "1"
    assert container[:13] in crictl("ps", "--no-trunc")
    crictl("stop", container)
    crictl("rm", container)
    crictl("stopp", pod)
    crictl("rmp", pod)
    with daemon.client() as client:
        assert client.list() == client.list_pods() == []
