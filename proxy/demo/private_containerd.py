"""A containerd in a temporary directory, for machines on which no containerd runs.

The process has a separate mount namespace, so its mounts end with it. Pods use the host's network, so no CNI
is needed, and nothing is pulled. Its cgroups are the machine's.

Its only container image is generated: busybox and its `sleep`. The archive is an OCI image
layout (image-spec, ``image-layout.md``), as ``ctr images import`` reads it. The pause container uses the same
image, so nothing has to be pulled.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import signal
import struct
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Self

from proxy.demo.client import CriClient
from proxy.demo.process_end import end_process
from proxy.model.errors import TopoproxyError, UnavailableError

_CONFIG = """\
version = 2
root = "{here}/root"
state = "{here}/state"
oom_score = 0
disabled_plugins = ["io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
  address = "{here}/containerd.sock"
[debug]
  address = "{here}/debug.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{here}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "{here}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        Root = "{here}/runc"
        SystemdCgroup = false
"""

_PROGRAMS = {"containerd": "containerd", "ctr": "containerd", "runc": "runc", "unshare": "util-linux"}

IMAGE = "localhost/topoproxy-demo:1"
"""The reference under which the image is imported."""
CTR_TIMEOUT_S = 60.0

SLEEP_COMMAND = ["/bin/sleep", "2147483647"]

_OCI_MEDIA_TYPE = "application/vnd.oci.image"
_OCI_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_PT_INTERP = 3


def write_image(archive: Path, busybox: Path = Path("/bin/busybox")) -> None:
    """Write the image archive.

    Raises:
        UnavailableError: There is no busybox, or it is not a static one.
    """
    try:
        program = busybox.read_bytes()
    except OSError as error:
        raise UnavailableError(f"cannot make a container image: {busybox}: {error.strerror}") from error
    if not _is_static(program):
        raise UnavailableError(
            f"cannot make a container image: {busybox} is not a static program (Debian: busybox-static)"
        )
    layer = _tar({"bin": None, "bin/busybox": program, "bin/sleep": "busybox", "bin/sh": "busybox"})
    blobs: dict[str, bytes] = {}

    def blob(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"mediaType": f"{_OCI_MEDIA_TYPE}.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    layers = [blob(layer, "layer.v1.tar")]
    config = {
        "architecture": _OCI_ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Env": ["PATH=/bin"], "Entrypoint": SLEEP_COMMAND},
        "rootfs": {"type": "layers", "diff_ids": [layers[0]["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_OCI_MEDIA_TYPE}.manifest.v1+json",
        "config": blob(_json(config), "config.v1+json"),
        "layers": layers,
    }
    entry = blob(_json(manifest), "manifest.v1+json")
    entry["annotations"] = {"io.containerd.image.name": IMAGE, "org.opencontainers.image.ref.name": "1"}
    index = {"schemaVersion": 2, "manifests": [entry]}
    archive.write_bytes(
        _tar({"oci-layout": b'{"imageLayoutVersion":"1.0.0"}', "index.json": _json(index), **blobs})
    )


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _tar(entries: dict[str, bytes | str | None]) -> bytes:
    """Pack files (bytes), symbolic links (str) and directories (None)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.mode = 0o755
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return out.getvalue()


def _is_static(program: bytes) -> bool:
    """Return whether a 64-bit little-endian ELF program names no interpreter (elf(5))."""
    if program[:6] != b"\x7fELF\x02\x01":
        return False
    (offset,) = struct.unpack_from("<Q", program, 32)
    size, count = struct.unpack_from("<HH", program, 54)
    kinds = [struct.unpack_from("<I", program, offset + i * size)[0] for i in range(count)]
    return _PT_INTERP not in kinds


def missing_programs() -> list[str]:
    """Return the programs that are not installed here, each with its Debian package."""
    return [
        f"{name} (package {package})" for name, package in _PROGRAMS.items() if shutil.which(name) is None
    ]


class PrivateContainerd:
    """Starts containerd in a directory, and ends it.

    Args:
        directory: An existing directory with a short path; everything is put there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = directory / "containerd.sock"

    def __enter__(self) -> Self:
        """Start it and wait until it answers.

        Raises:
            UnavailableError: A program is missing, or containerd does not start.
        """
        if lacking := missing_programs():
            raise UnavailableError(f"cannot start a containerd: not installed: {', '.join(lacking)}")
        write_image(self._directory / "image.tar")
        config = self._directory / "config.toml"
        config.write_text(_CONFIG.format(here=self._directory, image=IMAGE))
        (self._directory / "cni").mkdir(exist_ok=True)
        with (self._directory / "containerd.log").open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - no part of it is input
                ["unshare", "--mount", "--propagation", "private", "containerd", "-c", str(config)],  # noqa: S607
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C must not end it before its pods
            )
        try:
            self._wait(20.0)
            import_image(self.socket, self._directory / "image.tar", "--snapshotter", "native")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            end_process(self._process, signal.SIGTERM)
            self._process = None

    def _wait(self, seconds: float) -> None:
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            if self.socket.exists():
                try:
                    with CriClient(str(self.socket), timeout=1.0) as client:
                        client.version()
                except TopoproxyError:
                    pass
                else:
                    return
            time.sleep(0.05)
        lines = (self._directory / "containerd.log").read_text(errors="replace").splitlines()
        raise UnavailableError(f"cannot start a containerd: {lines[-1] if lines else 'it does not answer'}")


def import_image(socket: Path, archive: Path, *options: str) -> None:
    """Put the image of the demonstration into a containerd, with options for ``ctr images import``.

    Raises:
        UnavailableError: ``ctr`` failed; the message has what it printed.
    """
    _ctr(socket, "images", "import", *options, str(archive))


def remove_image(socket: Path) -> None:
    """Remove the image.

    Raises:
        UnavailableError: As ``import_image``.
    """
    _ctr(socket, "images", "rm", IMAGE)


def _ctr(socket: Path, *arguments: str) -> None:
    what = f"cannot run ctr {arguments[0]} {arguments[1]}"
    try:
        done = subprocess.run(  # noqa: S603 - no part of it is input
            ["ctr", "-a", str(socket), "-n", "k8s.io", *arguments],  # noqa: S607
            check=False,
            capture_output=True,
            text=True,
            timeout=CTR_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{what}: it did not end within {CTR_TIMEOUT_S:g} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        cause = lines[-1] if lines else f"it ended with {done.returncode}"
        raise UnavailableError(f"{what}: {cause}")
