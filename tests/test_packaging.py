"""The wheel: what is in it is what users get."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import proxy

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel with what is installed here, without network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(f"topoproxy-{proxy.__version__}.dist-info/{name}").decode()


def test_holds_one_package_and_its_metadata(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"proxy", f"topoproxy-{proxy.__version__}.dist-info"}
    assert wheel.filename is not None
    assert Path(wheel.filename).name == f"topoproxy-{proxy.__version__}-py3-none-any.whl"


def test_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "proxy"
    here = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here <= set(wheel.namelist())
    assert "proxy/py.typed" in wheel.namelist(), "the types are for users too"
    assert not [name for name in wheel.namelist() if "__pycache__" in name or name.endswith(".pyc")]


def test_holds_the_shipped_hooks_where_the_command_looks_for_them(wheel: zipfile.ZipFile) -> None:
    files = {f"proxy/hooks/shipped/{path.name}": path for path in (ROOT / "hooks").glob("*.py")}
    assert {name for name in wheel.namelist() if name.startswith("proxy/hooks/shipped/")} == set(files)
    assert "proxy/hooks/shipped/00-template.py" in files
    assert all(wheel.read(name) == path.read_bytes() for name, path in files.items())


def test_metadata(wheel: zipfile.ZipFile) -> None:
    lines = metadata(wheel, "METADATA").splitlines()
    assert f"Version: {proxy.__version__}" in lines
    assert "Name: topoproxy" in lines
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Python: >=3.11" in lines
    assert "Apache License" in metadata(wheel, "licenses/LICENSE")


def test_installs_the_command(wheel: zipfile.ZipFile) -> None:
    assert "topoproxy = proxy.__main__:main" in metadata(wheel, "entry_points.txt").splitlines()
    assert "proxy/__main__.py" in wheel.namelist()


def test_the_lock_names_no_place_to_download_from() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text
    requirements = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    assert all("==" in line and line.endswith("\\") for line in requirements), "pinned, and with hashes"
