"""Helpers of the scenarios of ``test_vm.py`` inside a virtual machine, as root, with containerd.

A scenario starts the daemon in front of containerd, and after each step checks the placement of containers in
the kernel's files, the affinity of the tasks and sysfs. Everything is about 25 times slower than on real
hardware, so time limits are long.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cri import Cri, affinities, code, cpuset_root, is_v2, online

from proxy.admin.client import query_admin
from proxy.api.cri import api_pb2 as pb
from proxy.model.errors import UnavailableError
from proxy.model.idset import CpuSet, Mask

RUNTIME = Path(os.environ.get("TOPOPROXY_RUNTIME") or "/run/containerd/containerd.sock")
DIRECTORY = Path("/run/topoproxy")
SOCKET = DIRECTORY / "cri.sock"
NODES = Path("/sys/devices/system/node")
RECONCILE_PERIOD_S = 5
LONG_S = 600.0
"""Only a failure takes this long; under emulation on a slow host seconds become minutes."""
PAUSE_S = 0.2
"""The pause between two checks, which are expensive in an emulated machine."""
ALL = online()


def node_cpus(node: int) -> CpuSet:
    """Return the CPUs of a NUMA node from sysfs."""
    return CpuSet.parse((NODES / f"node{node}/cpulist").read_text())


def core_of(cpu: int) -> CpuSet:
    """Return all threads of a CPU's core."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return CpuSet.parse(path.read_text())


def wait(what: str, check: Callable[[], bool], limit: float = LONG_S) -> float:
    """Wait until the check returns true; returns the seconds that it took."""
    begin = time.monotonic()
    while time.monotonic() - begin < limit:
        if check():
            return time.monotonic() - begin
        time.sleep(PAUSE_S)
    raise AssertionError(f"waited {limit:g} s for {what}")


def page_of(admin: Path, route: str) -> Any:
    """Query a daemon until it answers; it may be busy or being replaced."""
    begin = time.monotonic()
    while True:
        try:
            return query_admin(admin, route, timeout=60)
        except UnavailableError:
            if time.monotonic() - begin > LONG_S:
                raise
        time.sleep(PAUSE_S)


def step(message: str) -> None:
    """Print the result of a step with the time."""
    print(f"{time.monotonic():8.1f}  {message}", flush=True)


def save_journals(**files: str) -> None:
    """Save the journals of units in the results; the keywords are units, the values file names."""
    for unit, name in files.items():
        command = ["journalctl", "-b", "-u", unit, "--no-pager"]
        Path("/out", name).write_bytes(subprocess.run(command, check=False, capture_output=True).stdout)


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    """Make a call that must be rejected; returns its status code and message."""
    try:
        call()
    except grpc.RpcError as error:
        return code(error), str(error.details())  # type: ignore[attr-defined]
    raise AssertionError("the call was not rejected")


def refused(call: Callable[[], object]) -> grpc.StatusCode:
    """Make a call that must be rejected; returns its status code."""
    return refusal(call)[0]


@dataclass(frozen=True)
class Place:
    """The CPUs of a container: as written, in effect, and as its tasks' affinity; and its memory nodes."""

    cpus: CpuSet
    effective: CpuSet
    tasks: frozenset[CpuSet]
    mems: Mask

    def is_at(self, cpus: CpuSet, mems: Mask | None) -> bool:
        return self.cpus == self.effective == cpus and self.tasks <= {cpus} and mems in (None, self.mems)


def group_of(container: str) -> Path:
    """Find a container's cgroup.

    Raises:
        StopIteration: The container has no cgroup.
    """
    names = {container, f"crio-{container}", f"crio-{container}.scope", f"cri-containerd-{container}.scope"}
    return next(
        Path(directory) / entry
        for directory, below, _ in os.walk(cpuset_root())
        for entry in below
        if entry in names
    )


def place_in(directory: Path) -> Place:
    """Read the placement of the container of a cgroup."""
    effective = (
        ("cpuset.cpus.effective", "cpuset.mems.effective")
        if is_v2()
        else ("cpuset.effective_cpus", "cpuset.effective_mems")
    )
    return Place(
        CpuSet.parse((directory / "cpuset.cpus").read_text()),
        CpuSet.parse((directory / effective[0]).read_text()),
        affinities(directory),
        Mask.parse((directory / effective[1]).read_text()),
    )


def seen_in_container(cri: Cri, container: str) -> tuple[CpuSet, Mask]:
    """Return the CPUs and memory nodes that a program in the container reads from ``/proc/self``, by exec."""
    fetch: grpc.UnaryUnaryMultiCallable[bytes, bytes] = cri.channel.unary_unary(
        "/runtime.v1.RuntimeService/ExecSync"
    )
    values = [container, "grep", "_allowed_list", "/proc/self/status"]
    # ExecSyncRequest: container_id (1), cmd (2); ExecSyncResponse: stdout (1), short enough to parse as a
    # string.
    fields = zip(b"\x0a\x12\x12\x12", values, strict=True)
    request = b"".join(bytes([key, len(value)]) + value.encode() for key, value in fields)
    output = pb.ImageSpec.FromString(fetch(request, timeout=LONG_S)).image
    lines = dict(line.split(":") for line in output.splitlines())
    return CpuSet.parse(lines["Cpus_allowed_list"].strip()), Mask.parse(lines["Mems_allowed_list"].strip())


class GuestDaemon:
    """``topoproxy serve`` in front of containerd."""

    def __init__(self, **settings: object) -> None:
        DIRECTORY.mkdir(parents=True, exist_ok=True)
        self.configure(**settings)
        self.start()

    def configure(self, **settings: object) -> None:
        """Write the configuration that the next start reads."""
        values = {
            "apiVersion": "topoproxy/v1",
            "kind": "TopoproxyConfiguration",
            "cpuManagerPolicy": "static",
            "reconcilePeriod": f"{RECONCILE_PERIOD_S}s",
            "callTimeout": "60s",
            "admission": {"sharedFloor": 0, "sharedFloorPerNUMANode": 0},  # owners fill whole NUMA nodes here
            "listen": f"unix://{SOCKET}",
            "runtime": f"unix://{RUNTIME}",
            "stateDir": str(DIRECTORY / "state"),
            **settings,
        }
        (DIRECTORY / "config.yaml").write_text(json.dumps(values))

    def start(self) -> None:
        with Path("/out/proxy.log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "proxy", "serve", "--config", DIRECTORY / "config.yaml"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

        def answers() -> bool:
            assert self.process.poll() is None, Path("/out/proxy.log").read_text()[-2000:]
            with suppress(OSError, grpc.RpcError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(SOCKET))  # a gRPC client is expensive on emulated CPUs
                with Cri(SOCKET, "") as client:
                    return bool(client.version(timeout=10).runtime_name)
            return False

        step(f"the daemon answers after {wait('the daemon to answer', answers):.1f} s")

    def cli(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a topoproxy command for this daemon."""
        command = [sys.executable, "-m", "proxy", *args]
        if args[0] in ("status", "explain", "devices"):
            command += ["--timeout", "60", "--admin", f"unix://{DIRECTORY / 'admin.sock'}"]
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONG_S,
            check=False,
            env={**os.environ, "COLUMNS": "400"},
        )

    def status(self) -> Any:
        """Return the output of ``topoproxy status --json``, queried directly: Python starts slowly."""
        return page_of(DIRECTORY / "admin.sock", "/status")

    def explain(self, subject: str) -> str:
        """Return the output of ``topoproxy explain``, in wide lines."""
        done = self.cli("explain", subject)
        return done.stdout + done.stderr

    def kill9(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(LONG_S)
