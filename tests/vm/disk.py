"""Build the disk that virtual machines of the tests start from: Debian, containerd, Python, our images.

    python tests/vm/disk.py DIRECTORY

Needs root and Debian: packages come from where this machine's apt has its own. Nothing is installed and
nothing is mounted here: the kernel is only unpacked, and ``mke2fs`` fills the disk from a directory. The disk
is built again when this recipe changes. Takes about two minutes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

import images

HERE = Path(__file__).parent
SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
"""Which Debian has the Python that runs this: compiled modules of this environment are used in the guest."""
KERNEL = "linux-image-cloud-amd64"
PACKAGES = (
    *("systemd", "systemd-sysv", "dbus", "udev", "kmod", "iproute2", "iptables", "procps", "util-linux"),
    *("containerd", "runc", "containernetworking-plugins", "python3"),
)
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "debootstrap": "debootstrap",
    "mke2fs": "e2fsprogs",
    "dpkg-deb": "dpkg",
    "apt-get": "apt",
    "busybox": "busybox-static",
}
PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
SIZE_MIB = 2048
LIMIT_S = 900
DRIVERS = ("virtio_pci", "virtio_blk")
FILES = ("disk.img", "initrd.img", "vmlinuz")

CONTAINERD = """version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = DRIVER
"""
NETWORK = '{"cniVersion": "0.4.0", "name": "bed", "plugins": [{"type": "loopback"}]}\n'
SERVICE = """[Unit]
After=basic.target dbus.socket
Wants=basic.target dbus.socket
AllowIsolate=yes
[Service]
ExecStart=/bin/bash /in/.bed/guest.sh
Delegate=yes
"""


def why_not() -> str:
    """Return the reason why no disk can be built here, or an empty string."""
    if os.geteuid() != 0:
        return "only root can build the disk of a virtual machine"
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool, path=PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if sys.version_info[:2] not in SUITES:
        return f"no Debian is known to have Python {sys.version_info[0]}.{sys.version_info[1]}"
    return ""


def recipe() -> str:
    """Return of what a disk is built."""
    parts = [Path(__file__), HERE / "init.sh", Path(images.__file__)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()


def place_in(top: Path) -> Path:
    """The directory of today's disk: each recipe has its own, so that no disk changes below a machine."""
    return top / f"disk-{recipe()[:12]}"


def is_built(directory: Path) -> bool:
    return (directory / "complete").exists()


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a program; what it printed is the answer, and goes into the error where it fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PATH": PATH, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
    )
    if done.returncode:
        raise RuntimeError(f"cannot run {command[0]}: {done.stdout[-2000:]}")
    return done.stdout


def archive() -> str:
    """The address of the Debian archive that apt has here."""
    reported = run(
        "apt-get", "indextargets", "--format", "$(ORIGIN) $(LABEL) $(REPO_URI)", "Created-By: Packages"
    )
    for line in reported.splitlines():
        origin, label, address = line.split()
        if origin == label == "Debian":
            return address
    raise RuntimeError("cannot find the Debian archive: apt knows none")


def unpack_kernel(root: Path, work: Path) -> str:
    """Put a kernel and its modules into a system, without installing it; returns its release."""
    reported = run("apt-cache", "depends", KERNEL).split()
    package = reported[reported.index("Depends:") + 1]
    run("apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", package, cwd=work)
    (file,) = work.glob(f"{package}_*.deb")
    run("dpkg-deb", "-x", file, work / "kernel")
    (boot,) = (work / "kernel/boot").glob("vmlinuz-*")
    release = boot.name.removeprefix("vmlinuz-")
    (modules,) = (path for path in (work / "kernel").glob(f"**/lib/modules/{release}") if path.is_dir())
    shutil.copytree(modules, root / "usr/lib/modules" / release, symlinks=True)
    shutil.copy(boot, work / "vmlinuz")
    run("chroot", root, "depmod", release)
    return release


def with_needed(names: Sequence[str], modules: Path) -> list[Path]:
    """Kernel modules in an order in which each finds what it needs."""
    needs, found = {}, {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        name = Path(path).name.partition(".")[0]
        found[name] = modules / path
        needs[name] = [Path(word).name.partition(".")[0] for word in rest.split()]
    order: list[str] = []

    def add(name: str) -> None:
        for needed in needs[name]:
            add(needed)
        if name not in order:
            order.append(name)

    for name in names:
        add(name)
    return [found[name] for name in order]


def cpio(entries: Iterator[tuple[str, int, bytes]]) -> bytes:
    """An archive as the kernel unpacks it ("newc", Documentation/driver-api/early-userspace)."""
    out = bytearray()

    def pad() -> None:
        out.extend(bytes(-len(out) % 4))

    def put(number: int, name: str, mode: int, data: bytes) -> None:
        head = [number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0]
        out.extend(b"070701" + b"".join(b"%08x" % value for value in head) + name.encode() + b"\0")
        pad()
        out.extend(data)
        pad()

    for number, (name, mode, data) in enumerate(entries, 1):
        put(number, name, mode, data)
    put(0, "TRAILER!!!", 0, b"")
    return bytes(out)


def first_stage(modules: Path) -> bytes:
    """What the kernel starts: it loads the disks' drivers, and continues to the system on the disk."""

    def entries() -> Iterator[tuple[str, int, bytes]]:
        for directory in ("bin", "dev", "mod", "new", "proc"):
            yield directory, 0o40755, b""
        busybox = shutil.which("busybox", path=PATH)
        assert busybox is not None
        yield "bin/busybox", 0o100755, Path(busybox).read_bytes()
        for number, path in enumerate(with_needed(DRIVERS, modules)):
            yield f"mod/{number:02}-{path.name}", 0o100644, path.read_bytes()
        yield "init", 0o100755, (HERE / "init.sh").read_bytes()

    return cpio(entries())


def create_files(root: Path, work: Path) -> None:
    """Put our files into a fresh Debian, and remove what is not needed."""
    for junk in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man"):
        shutil.rmtree(root / junk, ignore_errors=True)
    for name, text in {
        "bed/containerd.toml": CONTAINERD,
        "etc/cni/net.d/10-bed.conflist": NETWORK,
        "etc/systemd/system/bed.service": SERVICE,
        "etc/machine-id": "0123456789abcdef0123456789abcdef\n",
        "etc/hostname": "bed\n",
        "etc/fstab": "",
        "etc/resolv.conf": "nameserver 127.0.0.1\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a link, perhaps, to a file of this machine
        path.write_text(text)
    for directory in ("in", "out"):
        (root / directory).mkdir(exist_ok=True)
    shutil.copy(images.build(work / "images"), root / "bed/images.tar")


def build(
    directory: Path, import_images: Callable[[Path], None], say: Callable[[str], object] = print
) -> None:
    """Build a disk, an initial RAM disk and a kernel in a directory, unless they are there.

    Args:
        directory: Where; made if it is not there.
        import_images: Starts a machine on the directory's disk that keeps what it writes: containerd itself
            must import the images.
        say: Gets what is being done.

    Raises:
        RuntimeError: A program failed; its words are in the message.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (
        (directory / "lock").open("w") as lock,
        tempfile.TemporaryDirectory(dir=directory, prefix="work") as name,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_built(directory):
            return
        work, root = Path(name), Path(name, "root")
        suite = SUITES[sys.version_info[:2]]
        say(f"building the disk of the virtual machines in {directory}: Debian {suite}")
        run("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, root, archive())
        say("the kernel, our images, and compiled Python")
        release = unpack_kernel(root, work)
        create_files(root, work)
        run("chroot", root, "python3", "-m", "compileall", "-q", "/usr/lib/python3")
        run("chroot", root, "sh", "-c", "python3 -m compileall -q /usr/lib/python3.*")
        (work / "initrd.img").write_bytes(first_stage(root / "usr/lib/modules" / release))
        disk = work / "disk.img"
        with disk.open("wb") as file:
            file.truncate(SIZE_MIB << 20)
        run("mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", root, disk)
        for file_name in FILES:
            (work / file_name).replace(directory / file_name)
        say("the first start, in which containerd imports the images")
        import_images(directory)
        (directory / "complete").touch()


if __name__ == "__main__":
    from machine import import_images

    if reason := why_not():
        sys.exit(reason)
    build(place_in(Path(sys.argv[1])), import_images)
