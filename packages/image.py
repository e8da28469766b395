"""The container image as an OCI layout, made without a registry and without a container engine.

Three layers: the files of some Debian packages (C library, Python, busybox), topoproxy with the packages of
the cluster agent, and the packages that the installer puts onto nodes. Every layer is a sorted archive with
one time and one owner, so that the same inputs give the same digests. The Debian packages are those that apt
offers when they are first downloaded; the bill of materials names them. Modules have their bytecode beside
them if the image is built with the version of Python that it holds.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import gmtime, strftime

import payload
from bytecode import bytecode
from tree import Entry, Tree, gz, tar, with_directories
from wheels import CACHE, ROOT

PYTHON = "3.11"
"""The version of Python in Debian 12."""
BASE = tuple(
    f"""
    base-files busybox-static libbz2-1.0 libc6 libcrypt1 libexpat1 libffi8 libgcc-s1 liblzma5 libssl3
    libstdc++6 libpython{PYTHON}-minimal libpython{PYTHON}-stdlib libuuid1 python{PYTHON}-minimal zlib1g
    """.split()
)
_UNUSED = re.compile(
    r"usr/share/(?:doc|man|lintian|locale|bug|info|binfmts|apps|applications|pixmaps|gdb)/"
    rf"|usr/lib/python{PYTHON}/(?:ensurepip|idlelib|lib2to3|pydoc_data|test|tkinter|turtledemo|distutils)/"
    r"|.*/gconv/|.*\.a$|etc/(?:update-motd\.d|profile\.d|apt|dpkg)/"
)
_MERGED = ("bin", "sbin", "lib", "lib64")
APPLETS = (
    "sh",
    "cat",
    "chroot",
    "cp",
    "cut",
    "date",
    "grep",
    "ls",
    "mkdir",
    "mv",
    "nsenter",
    "rm",
    "sed",
    "sha256sum",
    "sleep",
    "sort",
    "tail",
    "touch",
    "tr",
)
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
URL = "org.opencontainers.image"


@dataclass(frozen=True, slots=True)
class Image:
    """An image that was built.

    Attributes:
        path: The archive of the layout.
        digest: The digest of its index.
        base: The Debian packages in the image, as NAME_VERSION_ARCH.
    """

    path: Path
    digest: str
    base: tuple[str, ...]


def debian_packages(arch: str) -> list[Path]:
    """Return the Debian packages of the first layer, downloaded once.

    apt works in its own directory, so the machine's packages and architectures do not change.

    Raises:
        CalledProcessError: apt does not have one of the packages.
    """
    directory = CACHE.parent / f"image-{arch}-{hashlib.sha256(' '.join(BASE).encode()).hexdigest()[:8]}"
    if not (directory / "ready").exists():
        shutil.rmtree(directory, ignore_errors=True)
        for name in ("state/lists/partial", "cache/archives/partial", "debs"):
            (directory / name).mkdir(parents=True)
        (directory / "state/status").touch()
        options = {
            "APT::Architecture": arch,
            "APT::Architectures": arch,
            "APT::Sandbox::User": "root",
            "Dir::State": directory / "state",
            "Dir::State::status": directory / "state/status",
            "Dir::Cache": directory / "cache",
        }
        words = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        for command in (["update"], ["download", *BASE]):
            subprocess.run(["apt-get", "-qq", *words, *command], cwd=directory / "debs", check=True)
        (directory / "ready").touch()
    return sorted((directory / "debs").glob("*.deb"))


def base_files(debs: Sequence[Path]) -> Tree:
    """Return the files of Debian packages with one ``/usr``, without documents and tests."""
    tree: Tree = {name: Entry(link=f"usr/{name}") for name in _MERGED}
    for deb in debs:
        done = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            for item in archive:
                path = item.name.removeprefix("./").rstrip("/")
                if path.partition("/")[0] in _MERGED:
                    path = f"usr/{path}"
                if not path or _UNUSED.match(path + "/" if item.isdir() else path) or item.isdir():
                    continue
                if item.issym():
                    tree.setdefault(path, Entry(link=item.linkname))
                else:
                    content = archive.extractfile(item)
                    assert content is not None, path
                    tree[path] = Entry(content.read(), mode=item.mode & 0o755)
    tree |= {f"usr/bin/{name}": Entry(link="busybox") for name in APPLETS}
    tree |= {
        "usr/bin/python3": Entry(link=f"python{PYTHON}"),
        "etc/passwd": Entry(b"root:x:0:0::/root:/bin/sh\n"),
    }
    tree |= {"etc/group": Entry(b"root:x:0:\n"), "etc/nsswitch.conf": Entry(b"hosts: files dns\n")}
    tree |= {name: Entry(mode=0o755) for name in ("dev", "proc", "sys", "run", "root", "etc")}
    return tree | {"tmp": Entry(mode=0o1777)}


def build(out: Path, version: str, archs: Sequence[str], epoch: int, packages: Sequence[Path] = ()) -> Image:
    """Write the layout of an image for all architectures.

    Args:
        out: The directory.
        version: The version, and the tag.
        archs: ``amd64``, ``arm64``.
        epoch: The time of all files.
        packages: The packages for nodes; each architecture has its own.
    """
    blobs: dict[str, bytes] = {}
    manifests, base = [], []
    for arch in archs:
        debs = debian_packages(arch)
        base += [deb.stem.replace("%3a", ":") for deb in debs]
        own = {f"packages/{path.name}": Entry(path.read_bytes()) for path in packages if _for(path, arch)}
        program = payload.program(arch, epoch, (PYTHON,), "requirements-cluster.lock")
        layers = [
            tar(with_directories(tree | bytecode(tree, PYTHON)), epoch)
            for tree in (base_files(debs), program, own)
            if tree
        ]
        manifests.append(_manifest(blobs, layers, arch, version, epoch))
    index = _index(blobs, manifests, version)
    tree = {f"blobs/sha256/{digest}": Entry(data) for digest, data in blobs.items()}
    tree |= {"oci-layout": Entry(b'{"imageLayoutVersion":"1.0.0"}'), "index.json": Entry(index)}
    path = out / f"topoproxy-{version}.oci.tar"
    path.write_bytes(tar(tree, epoch))
    return Image(path, f"sha256:{hashlib.sha256(index).hexdigest()}", tuple(base))


def _for(path: Path, arch: str) -> bool:
    return arch in path.name or {"amd64": "x86_64", "arm64": "aarch64"}[arch] in path.name


def _manifest(
    blobs: dict[str, bytes], layers: Sequence[bytes], arch: str, version: str, epoch: int
) -> dict[str, object]:
    created = strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(epoch))
    config = {
        "architecture": arch,
        "os": "linux",
        "created": created,
        "config": {
            "Entrypoint": ["/usr/bin/topoproxy"],
            "Env": ["PATH=/usr/sbin:/usr/bin", "PYTHONDONTWRITEBYTECODE=1"],
            "Labels": {
                f"{URL}.version": version,
                f"{URL}.title": "topoproxy",
                f"{URL}.licenses": "Apache-2.0",
            },
        },
        "rootfs": {
            "type": "layers",
            "diff_ids": [f"sha256:{hashlib.sha256(each).hexdigest()}" for each in layers],
        },
        "history": [{"created": created, "created_by": "make package"} for _ in layers],
    }
    body = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _blob(blobs, CONFIG, _json(config)),
        "layers": [_blob(blobs, LAYER, gz(each)) for each in layers],
    }
    return {**_blob(blobs, MANIFEST, _json(body)), "platform": {"architecture": arch, "os": "linux"}}


def _index(blobs: dict[str, bytes], manifests: Sequence[Mapping[str, object]], version: str) -> bytes:
    """Return ``index.json``: it leads to one index with the manifests of all architectures."""
    inner = _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": list(manifests)})
    annotations = {f"{URL}.ref.name": version}
    entry = {**_blob(blobs, INDEX, inner), "annotations": annotations}
    return _json({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]})


def _blob(blobs: dict[str, bytes], kind: str, data: bytes) -> dict[str, object]:
    digest = hashlib.sha256(data).hexdigest()
    blobs[digest] = data
    return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def charts(out: Path, epoch: int) -> list[Path]:
    """Write the Helm charts as ``helm package`` does: one directory in a compressed archive."""
    made = []
    for file in sorted((ROOT / "deploy/helm").glob("*/Chart.yaml")):
        chart = file.parent
        version = re.search(r"(?m)^version: *(\S+)", file.read_text())
        assert version is not None, file
        tree = {
            f"{chart.name}/{path.relative_to(chart)}": Entry(
                path.read_bytes(), mode=0o755 if os.access(path, os.X_OK) else 0o644
            )
            for path in sorted(chart.rglob("*"))
            if path.is_file()
        }
        made.append(out / f"{chart.name}-chart-{version[1]}.tgz")
        made[-1].write_bytes(gz(tar(tree, epoch)))
    return made
