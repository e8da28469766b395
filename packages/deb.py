"""The Debian package: an ar archive of two tar archives; the same files give the same bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import payload
from tree import Entry, Tree, gz, tar, with_directories
from wheels import PYTHONS, after

SCRIPTS = Path(__file__).resolve().parent / "scripts"
USED = {"postinst": ("replace.sh",), "prerm": ("attached.sh",)}
"""Files whose functions a script uses in addition to those of ``common.sh``."""
HEAD = "#!/bin/sh\nset -e\nroot=${DPKG_ROOT:-}\n\n"
CONTROL = """\
Package: topoproxy
Version: {version}
Architecture: {arch}
Maintainer: The topoproxy authors <topoproxy@invalid>
Installed-Size: {size}
Depends: python3 (>= {lowest}), python3 (<< {above}), libc6 (>= 2.28), libstdc++6
Recommends: systemd
Section: admin
Priority: optional
Description: CRI proxy that places containers on CPUs and memory nodes
 topoproxy stands between kubelet and the container runtime. It forwards every
 call unchanged, except the few that place a container: there it chooses CPUs
 and NUMA nodes.
 .
 Installing it starts nothing and changes nothing of kubelet: topoproxy attach
 does.
"""


def script(name: str) -> bytes:
    """Return a maintainer script with the functions that it uses."""
    parts = ["common.sh", *USED.get(name, ()), name]
    return (HEAD + "\n".join((SCRIPTS / part).read_text() for part in parts)).encode()


def control(tree: Tree, version: str, arch: str, pythons: tuple[str, ...] = PYTHONS) -> Tree:
    """Return the files that describe the package."""
    size = sum(len(entry.data or b"") for entry in tree.values()) // 1024
    # dpkg's checksums are MD5; they protect against accidents only.
    sums = "".join(
        f"{hashlib.md5(entry.data, usedforsecurity=False).hexdigest()}  {path}\n"
        for path, entry in sorted(tree.items())
        if entry.data is not None
    )
    text = CONTROL.format(version=version, arch=arch, size=size, lowest=pythons[0], above=after(pythons[-1]))
    scripts = {name: Entry(script(name), mode=0o755) for name in ("postinst", "prerm", "postrm")}
    return {"control": Entry(text.encode()), "md5sums": Entry(sums.encode()), **scripts}


def build(out: Path, version: str, arch: str, epoch: int, pythons: tuple[str, ...] = PYTHONS) -> Path:
    """Write the package.

    Args:
        out: The directory.
        version: The version.
        arch: ``amd64`` or ``arm64``.
        epoch: The time of all files.
        pythons: The versions of Python that it can run with.
    """
    tree = with_directories(payload.program(arch, epoch, pythons) | payload.node_files("deb", epoch))
    members = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": gz(tar(control(tree, version, arch, pythons), epoch, "./")),
        "data.tar.gz": gz(tar(tree, epoch, "./")),
    }
    path = out / f"topoproxy_{version}_{arch}.deb"
    path.write_bytes(b"!<arch>\n" + b"".join(_member(name, data, epoch) for name, data in members.items()))
    return path


def _member(name: str, data: bytes, epoch: int) -> bytes:
    head = f"{name:<16}{epoch:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n"
    return head.encode() + data + b"\n" * (len(data) % 2)
