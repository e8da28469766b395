"""A throw-away machine with any topology: qemu emulates it, and it needs no virtualisation to do so.

A machine starts from the disk of ``disk.py``, which stays as it is; what a run brings comes on a second disk,
and what the run leaves in /out is written to a third: both are plain tar files. One host thread emulates all
CPUs in turn (``thread=single``): with more, guests of 32 CPUs lock up now and then in calls between CPUs.
"""

from __future__ import annotations

import io
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
"""The address at which a machine with a network reaches this one's loopback (qemu's user networking)."""
MASKED = ("udev-trigger", "hwdb-update", "journal-catalog-update", "random-seed", "update-utmp", "firstboot")


@dataclass(frozen=True)
class Machine:
    """What a machine is like.

    Attributes:
        sockets, nodes, cores, threads: Sockets, NUMA nodes of each, cores of each node, threads of each core.
        memory: MiB of each NUMA node.
        memory_only: Further NUMA nodes, which have memory and no CPUs.
        plugged: MiB of the memory of one more NUMA node, after these, that can be taken out while it runs.
        without_memory: NUMA nodes that have CPUs and no memory.
        distances: NUMA nodes report how far they are from each other; else all are alike.
        cards: NUMA nodes with a network card behind a root bridge of theirs.
        kernel: Words for the kernel's command line.
        cgroup: v1, v2, or hybrid: all controllers that v1 has are there, and v2 beside them at ``unified``.
        driver: What makes cgroups: ``cgroupfs``, or ``systemd``, which then is the first process.
        modules: Kernel modules that are loaded before containerd starts.
        network: It can open connections to servers on this machine's loopback, at ``HOST``.
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
        """How many NUMA nodes have CPUs; they come first."""
        return self.sockets * self.nodes

    @property
    def cpus(self) -> int:
        return self.numa_nodes * self.cores * self.threads

    def distance(self, one: int, other: int) -> int:
        """How far two NUMA nodes are from each other, in the units of firmware: 10 is the node itself."""
        if one == other:
            return LOCAL
        if max(one, other) >= self.numa_nodes:
            return EXPANDER
        return SOCKET if one // self.nodes == other // self.nodes else REMOTE

    def command_line(self) -> str:
        """The kernel's command line."""
        words = ["console=ttyS0", "quiet", "panic=-1", "mitigations=off", "tsc=reliable", "no_timer_check"]
        words += ["random.trust_cpu=on", "modprobe.blacklist=kvm,kvm_amd,kvm_intel"]
        words += ["memhp_default_state=online_movable"] if self.plugged else []
        words += ["net.ifnames=0"] if self.network else []
        if self.driver == "systemd":
            words += ["bed.init=systemd", "systemd.unit=bed.service", "systemd.show_status=0"]
            words += [f"systemd.mask=systemd-{name}.service" for name in MASKED]
            words.append(f"systemd.unified_cgroup_hierarchy={int(self.cgroup == 'v2')}")
            words += ["systemd.legacy_systemd_cgroup_controller=1"] if self.cgroup == "v1" else []
        return " ".join([*words, self.kernel]).strip()

    def _numa(self) -> Iterator[str]:
        filled, each = self.numa_nodes + self.memory_only, self.cores * self.threads
        every = range(filled + bool(self.plugged))
        for node in every:
            words = f"node,nodeid={node}"
            if node < self.numa_nodes:
                words += f",cpus={node * each}-{(node + 1) * each - 1}"
            if node not in self.without_memory and node < filled:
                yield from ("-object", f"memory-backend-ram,id=mem{node},size={self.memory}M")
                words += f",memdev=mem{node}"
            yield from ("-numa", words)
        if self.plugged:  # not reported at the start: the kernel finds it as memory that was put in
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
            directory: The disk's.
            work: Where the run has ``in.tar`` and ``out.tar``, and gets ``console`` and ``said``.
            keep: What is written to the disk stays.
        """
        # An AMD model would show no threads of a core: emulation lacks what reports of them.
        words = ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        words += ["-machine", "q35", "-accel", "tcg,thread=single,tb-size=1024"]
        # Linux 6.12 wants to be emulated without cx16; older ones do not miss it.
        words += ["-cpu", "max,vendor=GenuineIntel,cx16=off", "-m", self._memory()]
        shape = f"sockets={self.sockets},cores={self.nodes * self.cores},threads={self.threads}"
        words += ["-smp", f"{self.cpus},{shape}", *self._numa()]
        for number, node in enumerate(self.cards):
            at = f"id=bridge{number},bus=pcie.0,bus_nr={64 + 16 * number},numa_node={node}"
            port = f"id=port{number},bus=bridge{number},chassis={number + 1},slot={number + 1}"
            words += ["-device", f"pxb-pcie,{at}", "-device", f"pcie-root-port,{port}"]
            words += ["-device", f"virtio-net-pci,bus=port{number}"]
        files = (directory / "disk.img", work / "in.tar", work / "out.tar")
        for number, path in enumerate(files):
            kind = "" if number or keep else ",snapshot=on"
            words += ["-drive", f"if=none,id=disk{number},file={path},format=raw,cache=unsafe{kind}"]
            place = f"bus=pcie.0,addr={0x18 + number:#x}"
            words += ["-device", f"virtio-blk-pci,num-queues=1,drive=disk{number},{place}"]
        if self.network:
            words += ["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net"]
        words += ["-kernel", str(directory / "vmlinuz"), "-initrd", str(directory / "initrd.img")]
        words += ["-append", self.command_line()]
        for file in ("console", "said"):
            words += ["-serial", f"file:{work / file}"]
        return words


def _pack(machine: Machine, job: str, carried: Mapping[str, Path], limit: float, to: Path) -> None:
    """Write the tar that a run brings along."""
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


def _watch(process: subprocess.Popen[bytes], said: Path, limit: float, say: Callable[[str], object]) -> None:
    """Wait for a machine to end, and return what its job says meanwhile."""
    end, reported = time.monotonic() + limit, 0
    while True:
        over = process.poll() is not None or time.monotonic() > end
        lines = said.read_text(errors="replace").replace("\r", "").split("\n") if said.exists() else [""]
        for line in lines[reported : len(lines) - (not over)]:
            say(line)
        reported = max(reported, len(lines) - 1)
        if over:
            return
        time.sleep(0.2)


def run(
    machine: Machine,
    directory: Path,
    job: str,
    carried: Mapping[str, Path],
    out: Path,
    limit: float = 300,
    say: Callable[[str], object] = print,
    *,
    keep: bool = False,
) -> tuple[int, str]:
    """Start a machine, run a job in it, and bring back what the job left in /out.

    Args:
        machine: What it is like.
        directory: Of the disk.
        job: A line for bash, run as root in /in.
        carried: Files and directories for /in, by the name that they have there.
        out: Where results go, and what the console said (``console``).
        limit: Seconds for the job.
        say: Gets each line that the job prints, while it runs.
        keep: What is written to the disk stays.

    Returns:
        The job's exit status (124 where it took too long, 125 where nothing came back), and what it printed.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vm-") as name:
        work = Path(name)
        _pack(machine, job, carried, limit, work / "in.tar")
        with (work / "out.tar").open("wb") as results:
            results.truncate(RESULTS_MIB << 20)
        with (out / "qemu.log").open("wb") as log:
            command = machine.qemu(directory, work, keep=keep)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            _watch(process, work / "said", limit + BOOT_S, say)
        finally:
            process.kill()
            process.wait()
        for file in ("console", "said"):
            if (work / file).exists():
                shutil.copy(work / file, out / file)
        try:
            with tarfile.open(work / "out.tar") as tar:
                tar.extractall(out, filter="data")
            return int((out / ".status").read_text()), (out / ".said").read_text()
        except (OSError, tarfile.TarError, ValueError) as error:
            console = (out / "console").read_text(errors="replace") if (out / "console").exists() else ""
            return NO_STATUS, f"nothing came back: {error}\n{(out / 'qemu.log').read_text()}{console[-3000:]}"


def import_images(directory: Path) -> None:
    """Let containerd import the images into the disk itself.

    Raises:
        RuntimeError: It did not.
    """
    job = "ctr -n k8s.io images import /bed/images.tar && ctr -n k8s.io images ls -q && rm /bed/images.tar"
    small = Machine(1, 1, 2, 1)
    status, said = run(small, directory, job, {}, directory / "first-start", say=lambda _: None, keep=True)
    if status or images.PAUSE not in said or images.BUSYBOX not in said:
        raise RuntimeError(f"cannot import the images into {directory}: status {status}: {said}")
