"""The RPM, made by rpmbuild from the same files as the Debian package."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path

import payload
from deb import SCRIPTS
from tree import Tree, with_directories, write_tree
from wheels import MACHINES, PYTHONS, after

SPEC = """\
Name: topoproxy
Version: {version}
Release: 1
Summary: CRI proxy that places containers on CPUs and memory nodes
License: Apache-2.0
# One of these; which one the link in /usr/lib/topoproxy/bin leads to is decided at installation.
Requires: ((python3 >= {lowest} with python3 < {above}) or {either})
Requires: libstdc++ glibc >= 2.28
AutoReqProv: no
%global __os_install_post %{{nil}}
%global debug_package %{{nil}}
%global _build_id_links none
%global _binary_payload w6.gzdio

%description
topoproxy stands between kubelet and the container runtime. It forwards every call unchanged, except the few
that place a container: there it chooses CPUs and NUMA nodes. Installing it starts nothing and changes nothing
of kubelet: topoproxy attach does.

%install
cp -a {tree}/. %{{buildroot}}/

%posttrans
root=
{common}
{replace}
for python in python3 {pythons}; do
    if found=$(command -v $python) && "$found" -c '{check}'; then
        ln -sfn "$found" "$root/usr/lib/topoproxy/bin/python"
        break
    fi
done
compile
if booted; then
    systemd-tmpfiles --create topoproxy.conf >/dev/null 2>&1 || :
    systemctl daemon-reload || :
    replace_daemon
fi

%preun
root=
{common}
{attached}
if [ "$1" = 0 ]; then
    refuse_if_attached
    leave
fi

%postun
if [ -d /run/systemd/system ]; then systemctl daemon-reload || :; fi

%files
{files}
"""


def build(out: Path, version: str, arch: str, epoch: int, pythons: tuple[str, ...] = PYTHONS) -> Path:
    """Write the package.

    Args:
        out: The directory.
        version: The version.
        arch: ``amd64`` or ``arm64``.
        epoch: The time of all files.
        pythons: The versions of Python that it can run with.

    Raises:
        FileNotFoundError: There is no rpmbuild.
        CalledProcessError: rpmbuild fails.
    """
    tree = with_directories(payload.program(arch, epoch, pythons) | payload.node_files("rpm", epoch))
    with tempfile.TemporaryDirectory(prefix="topoproxy-rpm-") as name:
        top = Path(name)
        (top / "tree").mkdir()
        write_tree(tree, top / "tree", epoch)
        text = spec(tree, top / "tree", version, pythons)
        (top / "topoproxy.spec").write_text(_changelog(text, version, epoch))
        macros = {
            "_topdir": str(top / "work"),
            "_buildhost": "localhost",
            "use_source_date_epoch_as_buildtime": "1",
            "clamp_mtime_to_source_date_epoch": "1",
            "_rpmdir": str(top / "rpms"),
        }
        defines = [word for key, value in macros.items() for word in ("--define", f"{key} {value}")]
        command = ["rpmbuild", "-bb", "--quiet", "--target", f"{MACHINES[arch]}-linux", *defines]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
        done = subprocess.run(
            [*command, top / "topoproxy.spec"], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"cannot build the RPM: {done.stderr[-2000:]}")
        (built,) = (top / "rpms").rglob("*.rpm")
        path = out / built.name
        path.write_bytes(built.read_bytes())
        return path


def spec(tree: Tree, written: Path, version: str, pythons: tuple[str, ...] = PYTHONS) -> str:
    """Return the spec file, without its changelog.

    Args:
        tree: The files of the package.
        written: The directory with these files.
        version: The version.
        pythons: The versions of Python that it can run with.
    """
    lowest, above = pythons[0], after(pythons[-1])
    names = [f"python{python}" for python in reversed(pythons)]
    bounds = [f"({python.replace('.', ', ')})" for python in (lowest, above)]
    return SPEC.format(
        version=version,
        tree=written,
        lowest=lowest,
        above=above,
        either=" or ".join(names),
        pythons=" ".join(names),
        check=f"import sys; sys.exit(not {bounds[0]} <= sys.version_info < {bounds[1]})",
        common=(SCRIPTS / "common.sh").read_text(),
        replace=(SCRIPTS / "replace.sh").read_text(),
        attached=(SCRIPTS / "attached.sh").read_text(),
        files="\n".join(_listed(path, entry.data is None and not entry.link) for path, entry in tree.items()),
    ).replace("\n\n\n", "\n\n")


def _listed(path: str, directory: bool) -> str:
    if not directory:
        return f'"/{path}"'
    ours = path.startswith(("usr/lib/topoproxy", "usr/share/doc/topoproxy", "usr/share/licenses/topoproxy"))
    return f'%dir "/{path}"' if ours else ""


def _changelog(text: str, version: str, epoch: int) -> str:
    day = time.strftime("%a %b %d %Y", time.gmtime(epoch))
    note = "- /usr/share/doc/topoproxy/changelog.gz has the changes"
    return f"{text}\n%changelog\n* {day} The topoproxy authors <topoproxy@invalid> - {version}-1\n{note}\n"
