"""The files of an installed topoproxy: the same in the Debian package, the RPM and the image."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import completions
import manpages
from tree import DIRECTORY, Entry, Tree, gz
from wheels import PYTHONS, ROOT, site_packages, unpacked

HOME = "usr/lib/topoproxy"
SITE = f"{HOME}/lib/python3/site-packages"
ELF_MACHINES = {"amd64": 62, "arm64": 183}
DOC = "usr/share/doc/topoproxy"
PAGES = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
ZSH = {"deb": "usr/share/zsh/vendor-completions", "rpm": "usr/share/zsh/site-functions"}


def build_python(out: Path, epoch: int, targets: tuple[str, ...] = ("wheel",)) -> list[Path]:
    """Build topoproxy's wheel or source distribution."""
    options = [word for target in targets for word in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", *options, "-d", str(out)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    subprocess.run(command, cwd=ROOT, check=True, env=environment, capture_output=True)
    return sorted([*out.glob("topoproxy-*.whl"), *out.glob("topoproxy-*.tar.gz")])


@functools.cache
def program(
    arch: str, epoch: int, pythons: tuple[str, ...] = PYTHONS, lock: str = "requirements-runtime.lock"
) -> Tree:
    """Return the virtual environment: its modules, and the command.

    The interpreter is the distribution's: ``bin/python`` is a link to it.

    Args:
        arch: ``amd64`` or ``arm64``.
        epoch: The time that goes into the wheel.
        pythons: The versions of Python that it can run with.
        lock: The lock file whose packages it has.
    """
    with tempfile.TemporaryDirectory() as directory:
        (wheel,) = build_python(Path(directory), epoch)
        site = {**site_packages(arch, pythons, ROOT / lock), **unpacked(wheel)}
    settings = "home = /usr/bin\ninclude-system-site-packages = false\nversion = 3\n"
    start = "#!/usr/lib/topoproxy/bin/python -I\nfrom proxy.__main__ import main\n\nmain()\n"
    _check_machine(site, arch)
    tree = {f"{SITE}/{name}": entry for name, entry in site.items()}
    tree |= {f"{HOME}/lib/python{python}": Entry(link="python3") for python in pythons}
    return tree | {
        f"{HOME}/pyvenv.cfg": Entry(settings.encode()),
        f"{HOME}/bin/python": Entry(link="/usr/bin/python3"),
        f"{HOME}/bin/topoproxy": Entry(start.encode(), mode=0o755),
        "usr/bin/topoproxy": Entry(link="../lib/topoproxy/bin/topoproxy"),
    }


def _check_machine(site: Tree, arch: str) -> None:
    """Check that all compiled modules are for an architecture (e_machine of elf(5)).

    Raises:
        ValueError: A module is for another architecture, or there are no compiled modules.
    """
    libraries = {name: entry.data for name, entry in site.items() if name.endswith(".so") and entry.data}
    wrong = [
        name for name, data in libraries.items() if data[18:20] != ELF_MACHINES[arch].to_bytes(2, "little")
    ]
    if wrong or not libraries:
        raise ValueError(f"cannot package for {arch}: {wrong or 'no compiled module'} is for another machine")


def node_files(kind: str, epoch: int) -> Tree:
    """Return units, manual pages, completions and documents.

    Args:
        kind: ``deb`` or ``rpm``, which keep completions of zsh in different directories.
        epoch: The day on the manual pages.
    """
    tree: Tree = {}
    for name in ("topoproxy.service", "topoproxy.socket"):
        tree[f"usr/lib/systemd/system/{name}"] = _file(ROOT / "systemd" / name)
    tree["usr/lib/tmpfiles.d/topoproxy.conf"] = _file(ROOT / "systemd/tmpfiles.d/topoproxy.conf")
    day = time.strftime("%Y-%m-%d", time.gmtime(epoch))
    for name, text in manpages.pages(day).items():
        tree[f"usr/share/man/man{name[-1]}/{name}.gz"] = Entry(gz(text.encode()))
    shells = completions.scripts()
    tree["usr/share/bash-completion/completions/topoproxy"] = Entry(shells["bash"].encode())
    tree[f"{ZSH[kind]}/_topoproxy"] = Entry(shells["zsh"].encode())
    tree["usr/share/fish/vendor_completions.d/topoproxy.fish"] = Entry(shells["fish"].encode())
    tree[f"{HOME}/bootstrap-node.sh"] = Entry((ROOT / "systemd/bootstrap-node.sh").read_bytes(), mode=0o755)
    tree[f"{HOME}/hooks.d"] = tree["etc/topoproxy"] = DIRECTORY
    return tree | _documents(kind)


def _documents(kind: str) -> Tree:
    """Return pages and the files that they link to, at the same paths as in the repository."""
    tree = {f"{DOC}/{name}": _file(ROOT / name) for name in (*PAGES, "examples/network_vfs.py")}
    tree |= {f"{DOC}/docs/{path.name}": _file(path) for path in (ROOT / "docs").glob("*.md")}
    for directory in ("systemd/examples", "deploy"):
        for path in sorted((ROOT / directory).rglob("*")):
            if path.is_file():
                tree[f"{DOC}/{path.relative_to(ROOT)}"] = _file(path)
    changes = (ROOT / "CHANGELOG.md").read_bytes()
    tree[f"{DOC}/changelog.gz"] = Entry(gz(changes))
    licence = (ROOT / "LICENSE").read_bytes()
    note = b"topoproxy, and the packages in /usr/lib/topoproxy with the licences in their *.dist-info.\n\n"
    tree[f"{DOC}/copyright" if kind == "deb" else "usr/share/licenses/topoproxy/LICENSE"] = Entry(
        note + licence if kind == "deb" else licence
    )
    return tree


def _file(path: Path) -> Entry:
    return Entry(path.read_bytes(), mode=0o755 if os.access(path, os.X_OK) else 0o644)
