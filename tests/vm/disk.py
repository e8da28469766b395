"""Build the disk from which the virtual machines of the tests boot: Debian, containerd, Python, test images.

    python tests/vm/disk.py DIRECTORY

Needs root and Debian: packages come from the mirror that this host's apt uses. The host installs and mounts
nothing: the kernel package is only unpacked, and ``mke2fs`` fills the disk from a directory. The disk is
rebuilt when this recipe changes. The build takes about two minutes.
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
"""Debian suite by Python version: the guest uses the compiled modules of this environment."""
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
    """Return the hash of everything that determines the content of a disk."""
    parts = [Path(__file__), HERE / "init.sh", Path(images.__file__)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()


def place_in(top: Path) -> Path:
    """The directory of the current disk: each recipe has its own; running machines keep theirs."""
    return top / f"disk-{recipe()[:12]}"


def is_built(directory: Path) -> bool:
    return (directory / "complete").exists()


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a program and return its output; if the program fails, the error contains the output."""
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
    """Return the URL of the Debian archive that this host's apt uses."""
    output = run(
        "apt-get", "indextargets", "--format", "$(ORIGIN) $(LABEL) $(REPO_URI)", "Created-By: Packages"
    )
    for line in output.splitlines():
        origin, label, address = line.split()
        if origin == label == "Debian":
            return address
    raise RuntimeError("cannot find the Debian archive: apt has none configured")


def unpack_kernel(root: Path, work: Path) -> str:
    """Copy a kernel and its modules into a root file system, without installing it; return its release."""
    output = run("apt-cache", "depends", KERNEL).split()
    package = output[output.index("Depends:") + 1]
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
    """Return kernel modules in an order in which each one comes after its dependencies."""
    needs, paths = {}, {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        name = Path(path).name.partition(".")[0]
        paths[name] = modules / path
        needs[name] = [Path(word).name.partition(".")[0] for word in rest.split()]
    order: list[str] = []

    def add(name: str) -> None:
        for needed in needs[name]:
            add(needed)
        if name not in order:
            order.append(name)

    for name in names:
        add(name)
    return [paths[name] for name in order]


def cpio(entries: Iterator[tuple[str, int, bytes]]) -> bytes:
    """Return a cpio archive in the format that the kernel unpacks ("newc", driver-api/early-userspace)."""
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
    """Return the initial RAM disk: its init loads the disk drivers and switches to the system on the disk."""

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
    """Copy the files of the tests into a fresh Debian, and remove what is not needed."""
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
        path.unlink(missing_ok=True)  # may be a symlink to a file of the host
        path.write_text(text)
    for directory in ("in", "out"):
        (root / directory).mkdir(exist_ok=True)
    shutil.copy(images.build(work / "images"), root / "bed/images.tar")


def build(
    directory: Path, import_images: Callable[[Path], None], report: Callable[[str], object] = print
) -> None:
    """Build a disk, an initial RAM disk and a kernel in a directory, unless they exist.

    Args:
        directory: Where the disk is built; created if it does not exist.
        import_images: Boots a machine whose writes to the directory's disk persist: containerd itself must
            import the images.
        report: Called with a message about each step.

    Raises:
        RuntimeError: A program failed; the message contains its output.
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
        report(f"building the disk of the virtual machines in {directory}: Debian {suite}")
        run("debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", suite, root, archive())
        report("adding the kernel, the test images, and compiled Python")
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
        report("first boot: containerd imports the images")
        import_images(directory)
        (directory / "complete").touch()


if __name__ == "__main__":
    from machine import import_images

    if reason := why_not():
        sys.exit(reason)
    build(place_in(Path(sys.argv[1])), import_images)
