"""A disposable virtual machine with any topology, emulated by qemu without hardware virtualisation.

A machine boots from the disk of ``disk.py``, which is not modified. The input of a run is on a second disk,
and the content of /out is written to a third one; both are plain tar files. One host thread emulates all CPUs
in turn (``thread=single``): with several threads, guests of 32 CPUs sometimes lock up in calls between CPUs.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import images

GUEST = Path(__file__).with_name("guest.sh")
LOCAL, SOCKET, REMOTE, EXPANDER = 10, 12, 21, 32
RESULTS_MIB = 64
BOOT_S = 600
NO_STATUS = 125
NETFILTER = "nf_tables nft_compat nft_chain_nat xt_comment xt_mark xt_conntrack xt_MASQUERADE br_netfilter"
HOST = "10.0.2.2"
"""The address at which a machine with a network reaches the host's loopback (qemu's user networking)."""
MASKED = ("udev-trigger", "hwdb-update", "journal-catalog-update", "random-seed", "update-utmp", "firstboot")


@dataclass(frozen=True)
class VirtualMachine:
    """The configuration of a machine.

    Attributes:
        sockets, nodes, cores, threads: Sockets, NUMA nodes of each, cores of each node, threads of each core.
        memory: MiB of each NUMA node.
        memory_only: Further NUMA nodes, which have memory and no CPUs.
        plugged: MiB of memory of one more NUMA node, after these, that can be unplugged while it runs.
        without_memory: NUMA nodes that have CPUs and no memory.
        distances: NUMA nodes report different distances; otherwise all distances are equal.
        cards: NUMA nodes that have a network card behind their own root bridge.
        kernel: Further arguments for the kernel's command line.
        cgroup: v1, v2, or hybrid: all controllers on v1, and a v2 hierarchy mounted at ``unified``.
        driver: The cgroup driver: ``cgroupfs``, or ``systemd``, which then is the first process.
        modules: Kernel modules that are loaded before containerd starts.
        network: The guest can open connections to servers on the host's loopback, at ``HOST``.
    """

    sockets: int = 2
    nodes: int = 2
    cores: int = 4
    threads: int = 2
    memory: int = 512
    memory_only: int = 0
    plugged: int = 0
    without_memory: tuple[int, ...] = ()
    distances: bool = False
    cards: tuple[int, ...] = ()
    kernel: str = ""
    cgroup: str = "v2"
    driver: str = "cgroupfs"
    modules: str = ""
    network: bool = False

    @property
    def numa_nodes(self) -> int:
        """The number of NUMA nodes with CPUs; they come first."""
        return self.sockets * self.nodes

    @property
    def cpus(self) -> int:
        return self.numa_nodes * self.cores * self.threads

    def distance(self, one: int, other: int) -> int:
        """Return the distance between two NUMA nodes, in the units of firmware: 10 is the node itself."""
        if one == other:
            return LOCAL
        if max(one, other) >= self.numa_nodes:
            return EXPANDER
        return SOCKET if one // self.nodes == other // self.nodes else REMOTE

    def command_line(self) -> str:
        """Return the kernel's command line."""
        args = ["console=ttyS0", "quiet", "panic=-1", "mitigations=off", "tsc=reliable", "no_timer_check"]
        args += ["random.trust_cpu=on", "modprobe.blacklist=kvm,kvm_amd,kvm_intel"]
        args += ["memhp_default_state=online_movable"] if self.plugged else []
        args += ["net.ifnames=0"] if self.network else []
        if self.driver == "systemd":
            args += ["bed.init=systemd", "systemd.unit=bed.service", "systemd.show_status=0"]
            args += [f"systemd.mask=systemd-{name}.service" for name in MASKED]
            args.append(f"systemd.unified_cgroup_hierarchy={int(self.cgroup == 'v2')}")
            args += ["systemd.legacy_systemd_cgroup_controller=1"] if self.cgroup == "v1" else []
        return " ".join([*args, self.kernel]).strip()

    def _numa(self) -> Iterator[str]:
        filled, each = self.numa_nodes + self.memory_only, self.cores * self.threads
        every = range(filled + bool(self.plugged))
        for node in every:
            option = f"node,nodeid={node}"
            if node < self.numa_nodes:
                option += f",cpus={node * each}-{(node + 1) * each - 1}"
            if node not in self.without_memory and node < filled:
                yield from ("-object", f"memory-backend-ram,id=mem{node},size={self.memory}M")
                option += f",memdev=mem{node}"
            yield from ("-numa", option)
        if self.plugged:  # not reported at boot: the kernel detects it as hot-plugged memory
            yield from ("-object", f"memory-backend-ram,id=plugged,size={self.plugged}M")
            yield from ("-device", f"pc-dimm,memdev=plugged,node={filled}")
        pairs = ((one, other) for one in every for other in every if self.distances and one != other)
        for one, other in pairs:
            yield from ("-numa", f"dist,src={one},dst={other},val={self.distance(one, other)}")

    def _memory(self) -> str:
        start = (self.numa_nodes + self.memory_only - len(self.without_memory)) * self.memory
        return f"{start}M,slots=1,maxmem={start + self.plugged}M" if self.plugged else f"{start}M"

    def qemu(self, directory: Path, work: Path, *, keep: bool = False) -> list[str]:
        """Return qemu's command line.

        Args:
            directory: The directory of the disk.
            work: Contains ``in.tar`` and ``out.tar``; qemu writes ``console`` and ``output`` there.
            keep: Make writes to the disk persistent.
        """
        # An AMD model would show no threads of a core: qemu does not emulate their CPUID leaf.
        args = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        args += ["-machine", "q35", "-accel", "tcg,thread=single,tb-size=1024"]
        # Linux 6.12 must be emulated without cx16; older kernels do not need it.
        args += ["-cpu", "max,vendor=GenuineIntel,cx16=off", "-m", self._memory()]
        shape = f"sockets={self.sockets},cores={self.nodes * self.cores},threads={self.threads}"
        args += ["-smp", f"{self.cpus},{shape}", *self._numa()]
        for number, node in enumerate(self.cards):
            at = f"id=bridge{number},bus=pcie.0,bus_nr={64 + 16 * number},numa_node={node}"
            port = f"id=port{number},bus=bridge{number},chassis={number + 1},slot={number + 1}"
            args += ["-device", f"pxb-pcie,{at}", "-device", f"pcie-root-port,{port}"]
            args += ["-device", f"virtio-net-pci,bus=port{number}"]
        files = (directory / "disk.img", work / "in.tar", work / "out.tar")
        for number, path in enumerate(files):
            kind = "" if number or keep else ",snapshot=on"
            args += ["-drive", f"if=none,id=disk{number},file={path},format=raw,cache=unsafe{kind}"]
            place = f"bus=pcie.0,addr={0x18 + number:#x}"
            args += ["-device", f"virtio-blk-pci,num-queues=1,drive=disk{number},{place}"]
        if self.network:
            args += ["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net"]
        args += ["-kernel", str(directory / "vmlinuz"), "-initrd", str(directory / "initrd.img")]
        args += ["-append", self.command_line()]
        for file in ("console", "output"):
            args += ["-serial", f"file:{work / file}"]
        return args


def _pack(machine: VirtualMachine, job: str, carried: Mapping[str, Path], limit: float, to: Path) -> None:
    """Write the tar file with the input of a run."""
    settings = {
        "CGROUP": machine.cgroup,
        "DRIVER": machine.driver,
        "MODULES": f"'{machine.modules}'",
        "GATEWAY": HOST if machine.network else "",
        "LIMIT_S": f"{limit:g}",
    }
    ours = {
        "guest.sh": GUEST.read_text(),
        "job.sh": f"{job}\n",
        "settings.sh": "".join(f"export {name}={value}\n" for name, value in settings.items()),
    }
    with tarfile.open(to, "w") as tar:
        for name, text in ours.items():
            info = tarfile.TarInfo(f".bed/{name}")
            info.size, info.mode = len(text.encode()), 0o755
            tar.addfile(info, io.BytesIO(text.encode()))
        for name, path in carried.items():
            tar.add(path, name)


def _watch(
    process: subprocess.Popen[bytes], output: Path, limit: float, report: Callable[[str], object]
) -> None:
    """Wait for a machine to end, and report the lines that its job prints."""
    end, line_count = time.monotonic() + limit, 0
    while True:
        over = process.poll() is not None or time.monotonic() > end
        lines = output.read_text(errors="replace").replace("\r", "").split("\n") if output.exists() else [""]
        for line in lines[line_count : len(lines) - (not over)]:
            report(line)
        line_count = max(line_count, len(lines) - 1)
        if over:
            return
        time.sleep(0.2)


def run(
    machine: VirtualMachine,
    directory: Path,
    job: str,
    carried: Mapping[str, Path],
    out: Path,
    limit: float = 300,
    report: Callable[[str], object] = print,
    *,
    keep: bool = False,
) -> tuple[int, str]:
    """Start a machine, run a job in it, and copy the content of its /out to the host.

    Args:
        machine: The configuration of the machine.
        directory: The directory of the disk.
        job: A bash command line, run as root in /in.
        carried: Files and directories for /in, by their names there.
        out: The directory for the results and the output of the console (``console``).
        limit: Seconds that the job may take.
        report: Called with each line that the job prints, while it runs.
        keep: Make writes to the disk persistent.

    Returns:
        The job's exit status (124: it exceeded its time limit, 125: there are no results), and its output.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vm-") as name:
        work = Path(name)
        _pack(machine, job, carried, limit, work / "in.tar")
        with (work / "out.tar").open("wb") as results:
            results.truncate(RESULTS_MIB << 20)
        with (out / "qemu.log").open("wb") as log:
            command = machine.qemu(directory, work, keep=keep)
            if os.geteuid() == 0:  # emulation is slow: other tests on this machine can wait better
                command = ["nice", "-n", "-5", *command]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _watch(process, work / "output", limit + BOOT_S, report)
        finally:
            process.kill()
            process.wait()
        for file in ("console", "output"):
            if (work / file).exists():
                shutil.copy(work / file, out / file)
        try:
            with tarfile.open(work / "out.tar") as tar:
                tar.extractall(out, filter="data")
            return int((out / ".status").read_text()), (out / ".output").read_text()
        except (OSError, tarfile.TarError, ValueError) as error:
            console = (out / "console").read_text(errors="replace") if (out / "console").exists() else ""
            return (
                NO_STATUS,
                f"no results: {error}\n{(out / 'qemu.log').read_text()}{console[-3000:]}",
            )


def import_images(directory: Path) -> None:
    """Let containerd import the images on the disk itself.

    Raises:
        RuntimeError: The import failed.
    """
    job = "ctr -n k8s.io images import /bed/images.tar && ctr -n k8s.io images ls -q && rm /bed/images.tar"
    vm = VirtualMachine(1, 1, 2, 1)
    status, output = run(vm, directory, job, {}, directory / "first-start", report=lambda _: None, keep=True)
    if status or images.PAUSE not in output or images.BUSYBOX not in output:
        raise RuntimeError(f"cannot import the images into {directory}: status {status}: {output}")
