from __future__ import annotations

import hashlib
import io
import json
import struct
import tarfile

import pytest

from proxy.demo import private_containerd
from proxy.demo.private_containerd import IMAGE, remove_image, write_image
from proxy.model.errors import UnavailableError


def elf(*kinds: int) -> bytes:
    """A 64-bit ELF file with program headers of the kinds."""
    head = (
        b"\x7fELF\x02\x01\x01"
        + bytes(9)
        + struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, 0, 64, 0, 0, 64, 56, len(kinds), 0, 0, 0)
    )
    return head + b"".join(struct.pack("<I", kind) + bytes(52) for kind in kinds)


def test_the_archive_is_an_oci_layout(tmp_path):
    program = elf(1, 2)
    (tmp_path / "busybox").write_bytes(program)
    write_image(tmp_path / "image.tar", tmp_path / "busybox")
    with tarfile.open(tmp_path / "image.tar") as tar:
        files = {m.name: tar.extractfile(m).read() for m in tar}
    blobs = {
        name.removeprefix("blobs/sha256/"): data for name, data in files.items() if name.startswith("blobs/")
    }
    assert all(hashlib.sha256(data).hexdigest() == digest for digest, data in blobs.items())

    def blob(entry):
        data = blobs[entry["digest"].removeprefix("sha256:")]
        assert len(data) == entry["size"]
        return data

    (entry,) = json.loads(files["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == IMAGE
    manifest = json.loads(blob(entry))
    config = json.loads(blob(manifest["config"]))
    layer = blob(manifest["layers"][0])
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(layer).hexdigest()]
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        assert tar.extractfile("bin/busybox").read() == program
        assert tar.getmember("bin/busybox").mode == 0o755
        assert tar.getmember("bin/sleep").linkname == "busybox"


@pytest.mark.parametrize(
    ("program", "message"),
    [(elf(1, 3), "not a static program"), (b"#!/bin/sh\n", "not a static program"), (None, "No such file")],
)
def test_only_a_static_busybox_is_accepted(tmp_path, program, message):
    if program is not None:
        (tmp_path / "busybox").write_bytes(program)
    with pytest.raises(UnavailableError, match=message):
        write_image(tmp_path / "image.tar", tmp_path / "busybox")
    assert not (tmp_path / "image.tar").exists()


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("echo usage >&2; echo no such image >&2; exit 1", "no such image"),
        ("exit 3", "it ended with 3"),
        ("exec sleep 30", "it did not end within 0.5 s"),
    ],
)
def test_the_cause_of_a_failed_ctr_is_named(tmp_path, monkeypatch, script, cause):
    (tmp_path / "ctr").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "ctr").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(private_containerd, "CTR_TIMEOUT_S", 0.5)
    with pytest.raises(UnavailableError, match=f"^cannot run ctr images rm: {cause}$"):
        remove_image(tmp_path / "containerd.sock")
