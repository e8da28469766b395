"""One container image made by hand: busybox, its `sleep`, and nothing else.

The archive is an OCI image layout (image-spec, ``image-layout.md``), as ``ctr images import`` reads it. The
same image serves as the pause container's, so nothing has to be pulled.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import struct
import tarfile
from pathlib import Path

from proxy.model.errors import UnavailableError

IMAGE = "localhost/topoproxy-demo:1"
"""The reference that the image is imported under."""

SLEEP = ["/bin/sleep", "2147483647"]

_OCI = "application/vnd.oci.image"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
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
        return {"mediaType": f"{_OCI}.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    layers = [blob(layer, "layer.v1.tar")]
    config = {
        "architecture": _MACHINES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Env": ["PATH=/bin"], "Entrypoint": SLEEP},
        "rootfs": {"type": "layers", "diff_ids": [layers[0]["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_OCI}.manifest.v1+json",
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
