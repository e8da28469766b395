"""The wheel, which has everything that users get."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.markers import Marker

import proxy

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = ROOT / "requirements-runtime.lock"
POD = """
apiVersion: v1
kind: Pod
metadata: {name: job}
spec: {containers: [{name: main, resources: {limits: {cpu: 1, memory: 16Mi}}}]}
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel with the packages installed here, without network."""
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = directory.glob("*.whl")
    return zipfile.ZipFile(built)


def runtime_packages() -> list[str]:
    """Return the names of the packages that a node installs here, from the lock file."""
    heads = [line for line in RUNTIME.read_text().splitlines() if line and not line.startswith((" ", "#"))]
    split = [head.removesuffix("\\").strip().partition(" ; ") for head in heads]
    return [one.partition("==")[0] for one, _, marker in split if not marker or Marker(marker).evaluate()]


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new virtual environment; return the directory with its programs.

    Nothing is downloaded: the environment sees the packages of the runtime lock, and no others, as links to
    those that the tests run with.
    """
    environment = tmp_path_factory.mktemp("installed")
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin/python"
    (site,) = (environment / "lib").glob("python*/site-packages")
    for name in runtime_packages():
        found = distribution(name)
        for top in {
            file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")
        }:
            (site / top).symlink_to(found.locate_file(top))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    options = ["--no-index", "--no-deps", "--no-compile", "--quiet"]
    subprocess.run([*command, *options, str(wheel.filename)], check=True, timeout=60)
    return environment / "bin"


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(f"topoproxy-{proxy.__version__}.dist-info/{name}").decode()


def test_the_wheel_holds_one_package_and_its_metadata(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"proxy", f"topoproxy-{proxy.__version__}.dist-info"}
    assert wheel.filename is not None
    assert Path(wheel.filename).name == f"topoproxy-{proxy.__version__}-py3-none-any.whl"


def test_the_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "proxy"
    here = {
        str(path.relative_to(ROOT))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here <= set(wheel.namelist())
    assert "proxy/py.typed" in wheel.namelist(), "the types are for users too"
    assert not [name for name in wheel.namelist() if "__pycache__" in name or name.endswith(".pyc")]


def test_the_wheel_holds_the_shipped_hooks_at_their_path(wheel: zipfile.ZipFile) -> None:
    files = {f"proxy/hooks/shipped/{path.name}": path for path in (ROOT / "hooks").glob("*.py")}
    assert {name for name in wheel.namelist() if name.startswith("proxy/hooks/shipped/")} == set(files)
    assert "proxy/hooks/shipped/00-template.py" in files
    assert all(wheel.read(name) == path.read_bytes() for name, path in files.items())


def test_the_wheel_has_version_licence_and_python_in_its_metadata(wheel: zipfile.ZipFile) -> None:
    lines = metadata(wheel, "METADATA").splitlines()
    assert f"Version: {proxy.__version__}" in lines
    assert "Name: topoproxy" in lines
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Python: >=3.11" in lines
    assert "Apache License" in metadata(wheel, "licenses/LICENSE")


def test_the_wheel_installs_the_command(wheel: zipfile.ZipFile) -> None:
    assert "topoproxy = proxy.__main__:main" in metadata(wheel, "entry_points.txt").splitlines()
    assert "proxy/__main__.py" in wheel.namelist()


def test_the_lock_names_no_download_location() -> None:
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text
    requirements = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    assert all("==" in line and line.endswith("\\") for line in requirements), "pinned, and with hashes"


def call(program: Path, directory: Path, *args: str) -> str:
    """Run an installed program in an empty directory, without this checkout on the module path."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [program, *args],
        cwd=directory,
        env={**environment, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_installed_wheel_is_this_version(installed: Path, tmp_path: Path) -> None:
    assert proxy.__version__ in call(installed / "topoproxy", tmp_path, "--version")
    found = call(installed / "python", tmp_path, "-c", "import proxy; print(proxy.__file__)")
    assert Path(found.strip()).is_relative_to(installed.parent)


def test_the_installed_wheel_checks_a_configuration(installed: Path, tmp_path: Path) -> None:
    machine = call(installed / "topoproxy", tmp_path, "topology", "--json")
    assert '"cpus"' in machine
    (tmp_path / "config.yaml").write_text(
        call(installed / "topoproxy", tmp_path, "check-config", "--defaults")
    )
    assert call(installed / "topoproxy", tmp_path, "check-config", "--config", "config.yaml")


def test_the_installed_wheel_simulates_a_pod(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "here.json").write_text(call(installed / "topoproxy", tmp_path, "topology", "--json"))
    (tmp_path / "pod.yaml").write_text(POD)
    page = call(installed / "topoproxy", tmp_path, "simulate", "pod.yaml", "--machine", "here.json")
    assert page.startswith("here: 1 pod, ")


def test_the_installed_wheel_runs_the_demonstration(installed: Path, tmp_path: Path) -> None:
    assert "trading" in call(
        installed / "topoproxy", tmp_path, "demo", "--fast", "--no-color", "--width", "100"
    )


def test_the_installed_wheel_brings_its_hooks(installed: Path, tmp_path: Path) -> None:
    config = f"stateDir: {tmp_path}/state\nadminSocket: unix://{tmp_path}/admin.sock\n"
    (tmp_path / "config.yaml").write_text(
        f"{config}hooks: {{directory: {tmp_path}, vendorDirectory: {tmp_path}}}\n"
    )
    page = call(installed / "topoproxy", tmp_path, "hooks", "list", "--all", "--config", "config.yaml")
    assert "cpus-file" in page
