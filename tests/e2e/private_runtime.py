"""A private containerd with real cgroups for the duration of a test run.

The runtime has its own network and mount namespaces, so its bridges, firewall rules and mounts are separate
from the host's and vanish with its last process. The processes are in the host's pid namespace and use the
host's cgroups, as on a node: the files of a container are below
``<hierarchy>/<runtime.cgroup>/<pod's cgroup parent>/<id>``.

The registry of ``images.py`` keeps the namespaces open, because it must run inside them anyway. Unix sockets
with a path work across network namespaces, so clients and proxies stay outside.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import images
from cri import Cri, RpcError

CGROUPS = Path("/sys/fs/cgroup")
RUNTIME = os.environ.get("TOPOPROXY_CONTAINERD") or ""
"""A directory with another containerd than the host's (see ``runtimes.sh``), and optionally runc."""
PATH = os.pathsep.join([*([RUNTIME] if RUNTIME else []), os.environ.get("PATH") or os.defpath])
TOOLS = ("containerd", "runc", "ctr", "unshare", "nsenter", "ip", "iptables", "/bin/busybox")
START_LIMIT_S = float(os.environ.get("TOPOPROXY_PATIENCE_S") or 120)
STOP_LIMIT_S = 10.0


def skip_reason() -> str:
    """Return why this host cannot run a private runtime; an empty string if it can."""
    if os.geteuid() != 0:
        return "a container runtime needs root"
    if RUNTIME and not Path(RUNTIME, "containerd").is_file():
        return f"no containerd in {RUNTIME} (TOPOPROXY_CONTAINERD)"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (tests/e2e/install.sh installs them on Debian)"
    if len(os.sched_getaffinity(0)) < 2:
        return "exclusive CPUs cannot be shown with fewer than two CPUs"
    return ""


def wait_for(
    what: str, check: Callable[[], object], limit: float = START_LIMIT_S, pause: float = 0.02
) -> None:
    """Wait until the check returns true; an error that the check raises counts as false."""
    end = time.monotonic() + limit
    last: Exception | None = None
    while time.monotonic() < end:
        try:
            if check():
                return
        except (RpcError, OSError, AssertionError) as error:
            last = error
        time.sleep(pause)
    raise TimeoutError(f"waited {limit:g} s for {what}: {last or 'the check returned false'}")


def end_process(process: subprocess.Popen[str], limit: float = STOP_LIMIT_S) -> None:
    """End a child process: first by SIGTERM, then by SIGKILL."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit)
    if process.poll() is None:
        process.kill()
    process.wait(limit)
    if process.stdout:
        process.stdout.close()


def hierarchies() -> list[Path]:
    """Return the roots of all cgroup hierarchies: one on v2, one per controller on v1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [entry for entry in CGROUPS.iterdir() if entry.is_dir() and not entry.is_symlink()]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def write_toml(path: Path, tables: Mapping[str, Mapping[str, object]]) -> None:
    """Write the configuration of a runtime."""
    lines = []
    for table, entries in tables.items():
        lines += [f"[{table}]"] if table else []
        lines += [f"{key} = {json.dumps(value)}" for key, value in entries.items()]
    path.write_text("\n".join(lines) + "\n")


class PrivateRuntime:
    """One private container runtime: containerd, and others as subclasses.

    Attributes:
        name: The runtime's program.
        monitor: The prefix of the names of the processes that outlive the runtime.
        directory: The directory of all its files.
        socket: The CRI socket of the runtime.
        cgroup: The parent cgroup of its pods, with a leading slash; no other runtime has it.
        log: The log of the runtime.
    """

    name = "containerd"
    monitor = "containerd-shim"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / f"{self.name}.sock"
        self.cgroup = f"/bed-{zlib.crc32(str(directory).encode()):08x}-{os.getpid()}"
        self.log = directory / f"{self.name}.log"
        self._holder: subprocess.Popen[str] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._default_parents = [root / "k8s.io" for root in hierarchies() if not (root / "k8s.io").exists()]

    # Setup.

    def start(self) -> PrivateRuntime:
        """Create images and namespaces, and start the runtime. If this fails, everything is removed again."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            archive = images.build(self.directory / "images")
            self._network()
            self._configure()
            self._hold()
            self.restart()
            self._bring_images(archive)
            with self.client() as cri:
                for name in (images.PAUSE, images.BUSYBOX):
                    wait_for(f"image {name}", lambda name=name: cri.has_image(name))
        except BaseException:
            self.stop()
            raise
        return self

    def _bring_images(self, archive: Path) -> None:
        imported = self.run(["ctr", "-a", str(self.socket), "-n", "k8s.io", "images", "import", str(archive)])
        if imported.returncode:
            raise RuntimeError(f"cannot import the images: {imported.stdout}")

    def _configure(self) -> None:
        for name in ("certs/_default", "opt"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        cri = "plugins.'io.containerd.grpc.v1.cri'"
        values: dict[str, dict[str, object]] = {
            "": {
                "version": 2,
                "root": f"{self.directory}/root",
                "state": f"{self.directory}/state",
                "disabled_plugins": [
                    f"io.containerd.snapshotter.v1.{name}" for name in ("aufs", "btrfs", "devmapper", "zfs")
                ],
            },
            "grpc": {"address": str(self.socket)},
            "plugins.'io.containerd.internal.v1.opt'": {"path": f"{self.directory}/opt"},
            cri: {
                "sandbox_image": images.PAUSE,
                # a machine for tests is often a container itself, without CAP_SYS_RESOURCE and AppArmor
                "restrict_oom_score_adj": True,
                "disable_apparmor": True,
                "netns_mounts_under_state_dir": True,
                "stream_server_address": "127.0.0.1",
                "stream_server_port": "0",
            },
            f"{cri}.cni": {"bin_dir": "/usr/lib/cni", "conf_dir": f"{self.directory}/cni"},
            f"{cri}.registry": {"config_path": f"{self.directory}/certs"},
            f"{cri}.containerd.runtimes.runc": {"runtime_type": "io.containerd.runc.v2"},
            f"{cri}.containerd.runtimes.runc.options": {
                "SystemdCgroup": False,
                "Root": f"{self.directory}/runc",
            },
        }
        write_toml(self.directory / "config.toml", values)
        (self.directory / "certs/_default/hosts.toml").write_text(
            "[host.'http://127.0.0.1:5000']\ncapabilities = ['pull', 'resolve']\n"
        )

    def _network(self) -> None:
        (self.directory / "cni").mkdir(exist_ok=True)
        ipam = {
            "type": "host-local",
            "dataDir": f"{self.directory}/ipam",
            "ranges": [[{"subnet": "10.201.0.0/16"}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        plugins = [
            {"type": "bridge", "bridge": "bed0", "isGateway": True, "hairpinMode": True, "ipam": ipam},
            {"type": "portmap", "capabilities": {"portMappings": True}, "snat": True},
        ]
        network = {"cniVersion": "0.4.0", "name": "bed", "plugins": plugins}
        (self.directory / "cni/10-bed.conflist").write_text(json.dumps(network))

    def _hold(self) -> None:
        """Start the process that keeps the namespaces open, and wait until its registry listens."""
        script = 'mount --make-rshared / && ip link set lo up && exec "$@"'
        registry = [sys.executable, images.__file__, "serve", str(self.directory / "images"), "5000"]
        unshare = ["unshare", "--mount", "--net", "--propagation", "private"]
        with (self.directory / "registry.log").open("w") as log:
            self._holder = subprocess.Popen(
                [*unshare, "sh", "-c", script, "sh", *registry],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        stdout = self._holder.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], START_LIMIT_S)[0] or stdout.readline() != "ready\n":
            raise RuntimeError(f"cannot make the namespaces: {(self.directory / 'registry.log').read_text()}")

    def inside(self, command: Sequence[str], *, network: bool = True) -> list[str]:
        """Return the command line for the runtime's namespaces: both, or only the mount namespace."""
        assert self._holder is not None
        which = ["-m", "-n"] if network else ["-m"]
        # The runtime and its shims find their programs by PATH.
        return ["nsenter", "-t", str(self._holder.pid), *which, "--", "env", f"PATH={PATH}", *command]

    def run(self, command: Sequence[str], limit: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command in the runtime's namespaces; ``stdout`` of the result also has its error output."""
        return subprocess.run(
            self.inside(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )

    def client(self) -> Cri:
        """Return a client that is connected directly to the runtime."""
        return Cri(self.socket, self.cgroup)

    # The runtime process.

    @property
    def pid(self) -> int:
        """The pid of the runtime."""
        assert self._process is not None
        return self._process.pid

    def _command(self) -> list[str]:
        return ["containerd", "-c", str(self.directory / "config.toml")]

    def restart(self) -> None:
        """Start the runtime, which must not run, and wait until it answers."""
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                self.inside(self._command()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
            )
        process = self._process

        def answers() -> bool:
            if process.poll() is not None:
                raise RuntimeError(
                    f"{self.name} ended with {process.returncode}: {self.log.read_text()[-2000:]}"
                )
            # A client backs off longer after each refused connection, so each attempt uses a new one.
            with self.client() as cri:
                return bool(cri.list_pods(timeout=START_LIMIT_S / 15) is not None)

        wait_for(self.name, answers, pause=0.1)

    def kill9(self) -> None:
        """Kill the runtime, as a crash would; pods and their monitors continue to run."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(STOP_LIMIT_S)

    @contextlib.contextmanager
    def frozen(self):  # type: ignore[no-untyped-def]
        """Suspend the runtime: whatever changes meanwhile was changed by another process."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def clear(self) -> None:
        """Remove all pods; retry while the runtime refuses.

        In containerd 2.1 a start whose client has disconnected continues, and its container cannot be removed
        before the start ends. kubelet retries, too.
        """
        with self.client() as cri:

            def cleared() -> bool:
                for pod in cri.list_pods():
                    cri.stop_pod(pod.id)
                    cri.remove_pod(pod.id)
                return True

            wait_for("all pods to be removed", cleared)

    def widen(self) -> None:
        """Give the cgroups of the QoS classes all CPUs; a daemon that ends before an owner does not (v1)."""
        top = CGROUPS / "cpuset" / self.cgroup.lstrip("/")
        for path in (top / "kubepods", top / "kubepods/burstable", top / "kubepods/besteffort"):
            with contextlib.suppress(OSError):
                (path / "cpuset.cpus").write_text((top / "cpuset.cpus").read_text())

    # Teardown.

    def stop(self) -> None:
        """Remove pods, processes and cgroups, whatever fails. Mounts vanish with the namespace."""
        if self._process is not None:
            with contextlib.suppress(RpcError):
                self.clear()
            end_process(self._process)
        for pid in self._monitors():
            _kill(pid)
        for root in hierarchies():
            self._remove_cgroups(root / self.cgroup.lstrip("/"))
        for parent in self._default_parents:
            if parent.exists() and not any(child.is_dir() for child in parent.iterdir()):
                with contextlib.suppress(OSError):
                    parent.rmdir()
        if self._holder is not None:
            end_process(self._holder)
        self._process = self._holder = None

    def _monitors(self) -> list[int]:
        """Return the pids of monitors that still run: the runtime's directory is in their command lines."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    args = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    ours = any(arg.startswith(f"{self.directory}/") for arg in args)
                    if ours and Path(args[0]).name.startswith(self.monitor):
                        found.append(int(entry.name))
        return found

    def _remove_cgroups(self, top: Path) -> None:
        directories = [Path(directory) for directory, _, _ in os.walk(top, topdown=False)]
        for directory in directories:
            with contextlib.suppress(OSError):
                for pid in (directory / "cgroup.procs").read_text().split():
                    _kill(int(pid))
        end = time.monotonic() + STOP_LIMIT_S
        while (
            directories := [directory for directory in directories if directory.exists()]
        ) and time.monotonic() < end:
            for directory in directories:
                with contextlib.suppress(OSError):  # busy until the kernel has released the last process
                    directory.rmdir()
            time.sleep(0.01)
