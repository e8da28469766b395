"""The environment of the demonstration: a runtime, a cgroup tree, a machine, and the real proxy.

There are two environments. In the stand-in environment the machine, the kernel's cgroup tree and the runtime
are imitated; in the containerd environment all three are real. The proxy is ``topoproxy serve`` in both.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from proxy.admin.client import query_admin
from proxy.backends.cgroup.cpuset import open_cgroups
from proxy.backends.cgroup.fake.cpuset import FakeCgroups
from proxy.demo.client import NAMESPACE, CriClient, StartedPod
from proxy.demo.private_containerd import IMAGE, PrivateContainerd, import_image, remove_image, write_image
from proxy.demo.process_end import end_process
from proxy.demo.runtime import StandInRuntime
from proxy.demo.snapshot import Snapshot, read_snapshot
from proxy.executor.kernel_ports import Cgroups
from proxy.model.errors import PermissionDeniedError, TopoproxyError, UnavailableError
from proxy.model.machine import Machine
from proxy.topology.reader import read_machine
from proxy.topology.regular_machine import regular_machine
from proxy.topology.sysfs_writer import write_sysfs

CGROUP = "topoproxy-demo"
"""The cgroup below which the containerd environment keeps its pods."""

SETTINGS = {"cpuManagerPolicy": "static", "reconcilePeriod": "2s"}


class ProxyProcess:
    """Starts, kills and queries one proxy.

    Args:
        directory: Its files: configuration, state, log.
        settings: The configuration's keys and values, without ``listen`` and ``stateDir``.
    """

    def __init__(self, directory: Path, settings: Mapping[str, object]) -> None:
        self.socket = directory / "cri.sock"
        self.admin = directory / "admin.sock"
        self.log = directory / "topoproxy.log"
        self._config = directory / "config.yaml"
        self._process: subprocess.Popen[bytes] | None = None
        values = {
            "apiVersion": "topoproxy/v1",
            "kind": "TopoproxyConfiguration",
            "kubelet": {"stateDir": str(directory / "kubelet")},  # the machine's own kubelet is not used
            **settings,
            "listen": f"unix://{self.socket}",
            "adminSocket": f"unix://{self.admin}",
            "stateDir": str(directory / "state"),
        }
        self._config.write_text(yaml.safe_dump(values, sort_keys=False))

    @property
    def pid(self) -> int:
        """The process id; 0 if it does not run."""
        return self._process.pid if self._process is not None else 0

    def start(self, seconds: float = 60.0) -> float:
        """Start it and wait for the first good answer through it.

        Returns:
            Seconds until that answer.

        Raises:
            UnavailableError: The process ended, or did not answer in time; the message has the end of its
                log.
        """
        started = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - no part of it is input
                [sys.executable, "-m", "proxy", "serve", "--config", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C must reach only the demonstration, which cleans up
                env={key: value for key, value in os.environ.items() if key != "NOTIFY_SOCKET"},
            )
        while time.monotonic() < started + seconds and self._process.poll() is None:
            # Each attempt waits longer, for a busy machine. The first are short: a killed proxy leaves a
            # socket.
            if self._answers(max(0.5, (time.monotonic() - started) / 4)):
                return time.monotonic() - started
            time.sleep(0.02)
        self.kill()
        lines = self.log.read_text(errors="replace").splitlines()[-3:]
        raise UnavailableError("cannot start the proxy: " + ("\n".join(lines) or "it gave no answer"))

    def kill(self) -> None:
        """End it as a crash would (SIGKILL)."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it as systemd would (SIGTERM, and SIGKILL after ten seconds)."""
        self._end(signal.SIGTERM)

    def _end(self, with_signal: signal.Signals) -> None:
        if self._process is None:
            return
        end_process(self._process, with_signal)
        self._process = None

    def _answers(self, timeout: float) -> bool:
        """Return whether a process answers through the socket within ``timeout`` seconds."""
        if not self.socket.exists():
            return False
        try:
            with CriClient(str(self.socket), timeout=timeout) as client:
                client.version()
        except TopoproxyError:
            return False
        return True


@dataclass
class DemoEnvironment:
    """An environment that is set up.

    Attributes:
        about: What is real and what is imitated, in a sentence.
        fail_create: Makes the next create fail at the runtime; None if a create with an absent image is used
            for that.
        snapshot_at_create: The tree when the last CreateContainer reached the runtime; None if that could
            not be observed.
        pods: The pods that were run, in order; ``snapshot`` shows those that have a cgroup.
    """

    about: str
    machine: Machine
    cgroups: Cgroups
    proxy: ProxyProcess
    client: CriClient
    fail_create: Callable[[str], None] | None = None
    snapshot_at_create: Snapshot | None = None
    pods: list[StartedPod] = field(default_factory=list)

    def status(self) -> dict[str, Any]:
        """Query the proxy for the page of ``topoproxy status --json``."""
        page = query_admin(self.proxy.admin, "/status")
        assert isinstance(page, dict)
        return page

    def snapshot(self) -> Snapshot:
        """Read the cgroup files of everything that runs."""
        return read_snapshot(self.cgroups, self.pods)


@contextlib.contextmanager
def standin_environment(
    directory: Path, machine: Machine | None = None, version: int = 1
) -> Iterator[DemoEnvironment]:
    """Set up an environment in a directory, without root and without containerd.

    Args:
        directory: An existing, empty directory with a short path.
        machine: The imagined machine.
        version: Of the imitated cgroup tree.
    """
    machine = machine or regular_machine(2, 1, 4, 2, sibling_offset=False)
    write_sysfs(machine, directory / "machine")
    cgroups = FakeCgroups(directory / "cgroup", machine.online, machine.memory_nodes, version)
    settings = {
        **SETTINGS,
        "runtime": f"unix://{directory / 'runtime.sock'}",
        "sysfsRoot": str(directory / "machine/sys"),
        "procfsRoot": str(directory / "machine/proc"),
        "cgroupRoot": str(cgroups.root),
    }
    about = (
        "An imagined machine as sysfs files, a directory with the kernel's cpuset rules (cgroup "
        f"v{version}) and a small container runtime; the proxy between is the real one, topoproxy serve."
    )
    proxy = ProxyProcess(directory, settings)
    with StandInRuntime(directory / "runtime.sock", cgroups) as runtime, _running_proxy(proxy) as client:
        environment = DemoEnvironment(about, machine, cgroups, proxy, client, runtime.fail_next_create)

        def watch(_: object) -> None:
            environment.snapshot_at_create = environment.snapshot()

        runtime.before("CreateContainer", watch)
        yield environment


@contextlib.contextmanager
def containerd_environment(directory: Path, socket: Path) -> Iterator[DemoEnvironment]:
    """Set up an environment on a containerd, with this machine's CPUs and cgroups.

    Args:
        directory: An existing, empty directory with a short path.
        socket: The containerd to use; if it does not answer, a private one is started.

    Raises:
        TopoproxyError: Something is missing, or the containerd has pods that the proxy would move.
    """
    _check_root()
    with contextlib.ExitStack() as stack:
        stack.callback(_remove_cgroups)
        if _answers(socket):
            _refuse_if_pods_run(socket)
            write_image(directory / "image.tar")
            import_image(socket, directory / "image.tar")
            stack.callback(_remove_image, socket)
            which = f"the containerd at {socket}"
        else:
            socket = stack.enter_context(PrivateContainerd(directory)).socket
            which = "a private containerd, since none runs here"
        stack.callback(_end_pods, socket)
        proxy = ProxyProcess(directory, {**SETTINGS, "runtime": f"unix://{socket}"})
        client = stack.enter_context(_running_proxy(proxy, CGROUP, IMAGE))
        about = f"This machine's CPUs and cgroups and {which} ({client.version()}); nothing is imitated."
        environment = DemoEnvironment(
            about, read_machine(Path("/sys")), open_cgroups(Path("/sys/fs/cgroup")), proxy, client
        )
        yield environment


@contextlib.contextmanager
def _running_proxy(proxy: ProxyProcess, group: str = "", image: str = IMAGE) -> Iterator[CriClient]:
    try:
        proxy.start()
        with CriClient(str(proxy.socket), root=group, image=image) as client:
            yield client
    finally:
        proxy.stop()


def _answers(socket: Path) -> bool:
    if not socket.exists():
        return False
    try:
        with CriClient(str(socket), timeout=2.0) as client:
            client.version()
    except TopoproxyError:
        return False
    return True


def _refuse_if_pods_run(socket: Path) -> None:
    """Reject a containerd that runs pods: the proxy would move their containers to its pools."""
    with CriClient(str(socket)) as client:
        if pods := client.list_pods():
            raise UnavailableError(
                f"cannot use {socket} here: pods run there ({len(pods)}) and would be moved; "
                "name another containerd with --containerd-socket, or a free path to start a private one"
            )


def _check_root() -> None:
    if os.geteuid() != 0:
        raise PermissionDeniedError("cannot use containerd and the machine's cgroups: this needs root")


def _end_pods(socket: Path) -> None:
    """Remove the remaining pods, at the runtime itself: the proxy may be gone."""
    with contextlib.suppress(TopoproxyError), CriClient(str(socket)) as client:
        for pod in client.list_pods():
            if pod.metadata.namespace == NAMESPACE:
                client.end_pod(pod.id)


def _remove_image(socket: Path) -> None:
    """Remove the image, if containerd still runs."""
    with contextlib.suppress(TopoproxyError):
        remove_image(socket)


def _remove_cgroups() -> None:
    """Remove the cgroups that runc made as parents of the pods, in every hierarchy."""
    root = Path("/sys/fs/cgroup")
    for top in (root / CGROUP, *root.glob(f"*/{CGROUP}")):
        directories = sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True)
        for path in (*directories, top):
            with contextlib.suppress(OSError):
                path.rmdir()
