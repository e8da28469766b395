"""Minimal container images, and a read-only registry that serves them.

No container tool, compiler or network is needed: an image is a few JSON documents and a tar of files around
the static busybox. The registry ignores the host in an image name, so it can stand in for any registry: a
runtime that uses it as the mirror of all hosts can pull the images of the CRI conformance suite.

Run as a program (``images.py serve DIRECTORY PORT``) it is a private runtime's registry and prints ``ready``
once it listens.
"""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import json
import platform
import struct
import subprocess
import sys
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

PAUSE = "localhost/pause:1"
WAIT = ["/bin/tail", "-f", "/dev/null"]  # of a sandbox; not sleep: the suite searches for that name
BUSYBOX = "localhost/busybox:1"
STOP_SIGNAL = "SIGKILL"
"""Most containers here run a program that does not end at SIGTERM. When a sandbox is stopped with such a
container in it, CRI-O waits until the deadline of the call (v1.34.0 server/sandbox_stop_linux.go,
stopPodSandbox)."""

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())

USERS = "root:x:0:0::/root:/bin/sh\nwww-data:x:33:33::/srv:/bin/false\nnobody:x:65534:65534::/:/bin/false\n"
GROUPS = "root:x:0:\nwww-data:x:33:\nnogroup:x:65534:\n"


def web_server(port: int) -> str:
    """Return a script in place of a web server: the suite checks its pid file, command line, log and page."""
    return (
        "#!/bin/sh\ntrap 'exit 0' TERM QUIT INT\necho $$ > /var/run/nginx.pid; echo httpd is up\n"
        f"httpd -p {port} -h /srv\nwhile :; do sleep 3600 & wait $!; done\n"
    )


def euid_program() -> bytes:
    """Return an x86-64 program that prints its effective uid, like the no-new-privileges image."""
    root, user = b"Effective uid: 0\n", b"Effective uid: 1000\n"

    def choose(text: bytes, away: int) -> bytes:  # lea rsi,[rip+away]; mov edx,len
        return b"\x48\x8d\x35" + struct.pack("<i", away) + b"\xba" + struct.pack("<i", len(text))

    query = b"\xb8\x6b\0\0\0\x0f\x05\x85\xc0"  # geteuid(); test eax,eax
    write = (
        b"\xb8\x01\0\0\0\xbf\x01\0\0\0\x0f\x05\xb8\x3c\0\0\0\x31\xff\x0f\x05"  # write(1, rsi, edx); exit(0)
    )
    one = len(choose(root, 0))
    first = choose(root, one - 7 + 2 + one + len(write))
    second = choose(user, one - 7 + len(write) + len(root))
    code = query + first + b"\x74" + bytes([one]) + second + write + root + user
    base, head = 0x400000, 64 + 56
    size = head + len(code)
    elf = b"\x7fELF\x02\x01\x01" + bytes(9)
    elf += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, base + head, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    return elf + struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 4096) + code


class Layer:
    """The files of an uncompressed tar."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._buffer, mode="w", format=tarfile.GNU_FORMAT)  # noqa: SIM115

    def directory(self, name: str, mode: int = 0o755) -> Layer:
        info = tarfile.TarInfo(name)
        info.type, info.mode = tarfile.DIRTYPE, mode
        self._tar.addfile(info)
        return self

    def file(self, name: str, content: bytes | str, mode: int = 0o644) -> Layer:
        data = content.encode() if isinstance(content, str) else content
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), mode
        self._tar.addfile(info, io.BytesIO(data))
        return self

    def link(self, name: str, target: str) -> Layer:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = tarfile.SYMTYPE, target
        self._tar.addfile(info)
        return self

    def close(self) -> bytes:
        self._tar.close()
        return self._buffer.getvalue()


def base_layer(busybox: Path) -> bytes:
    """Return the base layer of every image: busybox with a link for each applet, and a minimal /etc."""
    layer = Layer()
    for name in (
        "bin",
        "dev",
        "etc",
        "proc",
        "root",
        "srv",
        "sys",
        "usr",
        "usr/bin",
        "usr/sbin",
        "var",
        "var/run",
    ):
        layer.directory(name)
    layer.directory("tmp", 0o1777)
    layer.file("bin/busybox", busybox.read_bytes(), 0o755)
    listing = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True, timeout=20)
    for applet in listing.stdout.split():
        if applet != "busybox":
            layer.link(f"bin/{applet}", "busybox")
    # Debian's static busybox lacks these two commands, which the suite calls.
    layer.file("usr/bin/pgrep", '#!/bin/sh\npidof "$@"\n', 0o755)
    layer.file("usr/bin/ipcs", "#!/bin/sh\ncat /proc/sysvipc/shm\n", 0o755)
    layer.file("srv/index.html", "<html><body>a page of the test bed</body></html>\n")
    return layer.file("etc/passwd", USERS).file("etc/group", GROUPS).close()


@dataclass
class Store:
    """A directory of blobs named by digest, and a table of image names and their digests."""

    directory: Path
    names: dict[str, dict[str, str | int]] = field(default_factory=dict)

    def blob(self, data: bytes) -> tuple[str, int]:
        digest = hashlib.sha256(data).hexdigest()
        (self.directory / digest).write_bytes(data)
        return f"sha256:{digest}", len(data)

    def image(self, names: list[str], layers: list[bytes], **config: object) -> None:
        """Store an image under several names; ``config`` holds Cmd, Entrypoint or User."""
        descriptors = []
        for layer in layers:
            digest, size = self.blob(gzip.compress(layer, 1, mtime=0))
            descriptors.append({"mediaType": LAYER, "digest": digest, "size": size})
        document = {
            "architecture": ARCH,
            "os": "linux",
            "config": {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"], "StopSignal": STOP_SIGNAL, **config},
            "rootfs": {
                "type": "layers",
                "diff_ids": [f"sha256:{hashlib.sha256(x).hexdigest()}" for x in layers],
            },
        }
        digest, size = self.blob(json.dumps(document).encode())
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": digest, "size": size},
            "layers": descriptors,
        }
        digest, size = self.blob(json.dumps(manifest).encode())
        for name in names:
            self.names[name] = {"digest": digest, "size": size}


def _suite_images(store: Store, base: bytes) -> None:
    """Store the images that the conformance suite pulls, by repository path (without a host)."""
    shell = {"Cmd": ["sh"]}
    pause = {"Entrypoint": WAIT}
    mark = [
        base,
        Layer().file("mark", "3.9").close(),
    ]  # the suite removes this image, so it must differ from the sandbox image
    store.image(["pause:3.9"], mark, **pause)
    store.image([f"pause:{version}" for version in ("3.6", "3.8", "3.10")], [base], **pause)
    e2e, own = "e2e-test-images/", "k8s-staging-cri-tools/"
    store.image([e2e + "busybox:1.29-2", "library/busybox:latest"], [base], **shell)
    for names, port in (
        ([e2e + "nginx:1.14-2", e2e + "httpd:2.4.39-4"], 80),
        ([f"{own}hostnet-nginx-{ARCH}:latest"], 12003),
    ):
        script = Layer().file("usr/sbin/nginx", web_server(port), 0o755).close()
        store.image(names, [base, script], Cmd=["/usr/sbin/nginx", "master process"])
    program = euid_program() if ARCH == "amd64" else b"#!/bin/sh\nexec id -u\n"
    setuid = Layer().file("nnp", program, 0o4755).close()
    store.image([e2e + "nonewprivs:1.3"], [base, setuid], Entrypoint=["/nnp"])
    store.image(
        [f"{own}test-image-tags:{tag}" for tag in (1, 2, 3)],
        [base, Layer().file("tags", "").close()],
        **shell,
    )
    singles = ("latest:latest", "tag:test", "tag:all", "1:latest", "2:latest", "3:latest", "digest:latest")
    for single in singles:
        store.image([f"{own}test-image-{single}"], [base, Layer().file("mark", single).close()], **shell)
    for name, user in (
        ("uid", "1002"),
        ("username", "www-data"),
        ("uid-group", "1003:1003"),
        ("username-group", "www-data:www-data"),
    ):
        store.image([f"{own}test-image-user-{name}:latest"], [base], User=user, **shell)
    groups = Layer().file("etc/passwd", USERS + "default-user:x:1000:1000::/:/bin/sh\n")
    groups.file("etc/group", GROUPS + "default-user:x:1000:\ngroup-defined-in-image:x:50000:default-user\n")
    store.image([own + "test-image-predefined-group:latest"], [base, groups.close()], User="1000", **shell)


def build(directory: Path, busybox: Path = Path("/bin/busybox")) -> Path:
    """Build all images; returns the tar (OCI layout) to import, which contains ``PAUSE`` and ``BUSYBOX``."""
    blobs = directory / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    base = base_layer(busybox)
    store = Store(blobs)
    _suite_images(store, base)
    (directory / "names.json").write_text(json.dumps(store.names))

    local = Store(directory / "local")
    local.directory.mkdir(exist_ok=True)
    local.image([PAUSE], [base, Layer().file("pause", "").close()], Entrypoint=WAIT)
    local.image([BUSYBOX], [base], Cmd=["sh"])
    tar_path = directory / "images.tar"
    with tarfile.open(tar_path, "w") as tar:
        entries = [
            {"mediaType": MANIFEST, **place, "annotations": {"io.containerd.image.name": name}}
            for name, place in local.names.items()
        ]
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
        files = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": json.dumps(index).encode()}
        files |= {
            f"blobs/sha256/{blob.name}": blob.read_bytes() for blob in sorted(local.directory.iterdir())
        }
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    return tar_path


class Registry(http.server.BaseHTTPRequestHandler):
    """Serves GET and HEAD of ``/v2/NAME/manifests/REF`` and ``/v2/NAME/blobs/DIGEST`` only."""

    protocol_version = "HTTP/1.1"
    directory: Path
    names: dict[str, dict[str, str]]

    def _find(self) -> tuple[str, str] | None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if len(parts) < 4 or parts[0] != "v2":
            return None
        name, kind, what = "/".join(parts[1:-2]), parts[-2], parts[-1]
        if kind == "blobs":
            return what, "application/octet-stream"
        if kind != "manifests":
            return None
        known = [v["digest"] for k, v in self.names.items() if k.rpartition(":")[0] == name]
        digest = what if what in known else self.names.get(f"{name}:{what}", {}).get("digest")
        return (digest, MANIFEST) if digest else None

    def do_GET(self) -> None:
        found = self._find()
        path = self.directory / "blobs" / found[0].removeprefix("sha256:") if found else None
        status, body, kind = 404, b'{"errors": [{"code": "NOT_FOUND"}]}', "application/json"
        if self.path.rstrip("/") == "/v2":
            status, body = 200, b"{}"
        elif found and path and path.is_file():
            status, body, kind = 200, path.read_bytes(), found[1]
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == 200 and found:
            self.send_header("Docker-Content-Digest", found[0])
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - the name is given by the base class


def serve(directory: Path, port: int) -> None:
    """Serve on the loopback address until the process ends."""
    Registry.directory = directory
    Registry.names = json.loads((directory / "names.json").read_text())
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Registry) as server:
        print("ready", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[2]), int(sys.argv[3]))
