"""The container image: a consistent and reproducible OCI layout that runs."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

import image
import payload
import pytest
from bytecode import bytecode
from tree import Entry

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


def test_bytecode_is_the_same_each_time_and_not_compared_with_the_source() -> None:
    source = {
        "a/__init__.py": Entry(b"SET = {'x', 'y', 'z'} & frozenset(('p', 'q'))\n"),
        "a/b.py": Entry(b"X = 1\n"),
    }
    broken = {"a/old.py": Entry(b"print 1\n"), "a/data.txt": Entry(b"x")}
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    made = bytecode(source | broken, version)
    tag = sys.implementation.cache_tag
    assert list(made) == [f"a/__pycache__/__init__.{tag}.pyc", f"a/__pycache__/b.{tag}.pyc"]
    assert made == bytecode(dict(reversed((broken | source).items())), version)
    for entry in made.values():
        assert entry.data is not None
        assert entry.data[:4] == MAGIC_NUMBER
        assert entry.data[4:8] == b"\1\0\0\0", "a hash that is not checked (PEP 552)"
    assert bytecode(source, "3.0") == {}, "another version of Python would ignore it"


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

    if f"{sys.version_info[0]}.{sys.version_info[1]}" == image.PYTHON:
        imports = "import os, sys, proxy.daemon, proxy.agent.process, proxy.extender.service"
        places = "[m.__spec__.cached for m in sys.modules.values() if getattr(m, '__spec__', None)]"
        without = f"{imports}; print(*(path for path in {places} if path and not os.path.exists(path)))"
        compiled = run("/usr/lib/topoproxy/bin/python", "-IB", "-c", without)  # -B: none is written meanwhile
        assert [path for path in compiled.split() if "/sitecustomize." not in path] == [], "it is a link"
    assert run("/usr/bin/topoproxy", "version") == f"topoproxy {__version__}\n"
    assert "--node" in run("/usr/bin/topoproxy", "agent", "--help") or run(
        "/usr/bin/topoproxy", "agent", "--help"
    )
    run("/usr/bin/python3", "-c", "import ssl, ctypes, json")
    run("/usr/lib/topoproxy/bin/python", "-I", "-c", "import lightkube, grpc, google.protobuf, msgspec, yaml")
    assert run("/bin/sh", "-c", "echo a b | tr a c") == "c b\n"
    assert run("/bin/sh", "-c", "nsenter --help 2>&1 || :")
