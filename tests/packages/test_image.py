"""The container image: a consistent and reproducible OCI layout that runs."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import image
import payload
import pytest

from proxy import __version__
from tests.packages.conftest import ARCH, EPOCH, VERSION, Built

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def made(built: Built, tmp_path_factory: pytest.TempPathFactory) -> image.Image:
    if not shutil.which("apt-get"):
        pytest.skip("the image is made of Debian's packages: there is no apt-get")
    try:
        return image.build(tmp_path_factory.mktemp("image"), VERSION, [ARCH], EPOCH, [built.deb])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"Debian's packages cannot be downloaded: {error}")


def layout(path: Path) -> dict[str, bytes]:
    found = {}
    with tarfile.open(path) as archive:
        for item in archive:
            if item.isfile():
                content = archive.extractfile(item)
                assert content is not None
                found[item.name] = content.read()
    return found


def blob(files: dict[str, bytes], descriptor: Any) -> bytes:
    algorithm, _, digest = descriptor["digest"].partition(":")
    data = files[f"blobs/{algorithm}/{digest}"]
    assert len(data) == descriptor["size"]
    assert hashlib.sha256(data).hexdigest() == digest
    return data


def manifest(files: dict[str, bytes]) -> Any:
    (entry,) = json.loads(files["index.json"])["manifests"]
    assert entry["annotations"]["org.opencontainers.image.ref.name"] == VERSION
    (inner,) = json.loads(blob(files, entry))["manifests"]
    assert inner["platform"] == {"architecture": ARCH, "os": "linux"}
    return json.loads(blob(files, inner))


def test_two_builds_have_the_same_digest(built: Built, made: image.Image, tmp_path: Path) -> None:
    payload.program.cache_clear()
    again = image.build(tmp_path, VERSION, [ARCH], EPOCH, [built.deb])
    assert again.digest == made.digest
    assert again.path.read_bytes() == made.path.read_bytes()


def test_the_layout_holds_exactly_the_blobs_that_it_names(made: image.Image) -> None:
    files = layout(made.path)
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    whole = manifest(files)
    config = json.loads(blob(files, whole["config"]))
    assert config["config"]["Entrypoint"] == ["/usr/bin/topoproxy"]
    import gzip

    diffs = [hashlib.sha256(gzip.decompress(blob(files, each))).hexdigest() for each in whole["layers"]]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{each}" for each in diffs]
    assert len(files) == 2 + 3 + len(whole["layers"])


def test_the_image_names_its_base(made: image.Image) -> None:
    names = {name.partition("_")[0] for name in made.base}
    assert names == set(image.BASE)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_image_runs_and_has_the_packages_for_nodes(
    built: Built, made: image.Image, tmp_path: Path
) -> None:
    files = layout(made.path)
    for layer in manifest(files)["layers"]:
        with tarfile.open(fileobj=io.BytesIO(blob(files, layer))) as archive:
            archive.extractall(tmp_path, filter="fully_trusted")
    assert (tmp_path / "packages" / built.deb.name).read_bytes() == built.deb.read_bytes()

    def run(*args: str) -> str:
        done = subprocess.run(
            ["chroot", str(tmp_path), *args], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("/usr/bin/topoproxy", "version") == f"topoproxy {__version__}\n"
    assert "--node" in run("/usr/bin/topoproxy", "agent", "--help") or run(
        "/usr/bin/topoproxy", "agent", "--help"
    )
    run("/usr/bin/python3", "-c", "import ssl, ctypes, json")
    run("/usr/lib/topoproxy/bin/python", "-I", "-c", "import lightkube, grpc, google.protobuf, msgspec, yaml")
    assert run("/bin/sh", "-c", "echo a b | tr a c") == "c b\n"
    assert run("/bin/sh", "-c", "nsenter --help 2>&1 || :")
