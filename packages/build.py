"""Build all packages of a release: python packages/build.py [--out DIR] [--arch ARCH]... [KIND...]."""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import deb
import image
import payload
import rpm
import sbom
from wheels import MACHINES, ROOT

from proxy import __version__

KINDS = ("python", "deb", "rpm", "image", "helm")
EARLIEST = 315532800
"""1980-01-01, the earliest time that a wheel can hold: the time of all files if no commit can be read."""


def source_date_epoch() -> int:
    """Return the time of all built files: SOURCE_DATE_EPOCH, or the time of the last commit."""
    if text := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(text)
    command = ["git", "log", "-1", "--format=%ct"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return int(done.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError) as err:
        cause = getattr(err, "stderr", None) or str(err)
        print(
            f"make package: cannot read the time of the last commit, all files are of 1980: {cause.strip()}",
            file=sys.stderr,
        )
        return EARLIEST


def main() -> int:
    """Build the requested packages; return 1 if one of them could not be built."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; all by default")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--arch", action="append", choices=list(MACHINES), help="both by default")
    words = parser.parse_args()
    kinds, epoch = words.kinds or KINDS, source_date_epoch()
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"there is no kind {', '.join(sorted(unknown))}")
    words.out.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    base: set[str] = set()
    failed = False
    if "python" in kinds:
        made += payload.build_python(words.out, epoch, ("wheel", "sdist"))
    for arch in words.arch or MACHINES:
        if "deb" in kinds:
            made.append(deb.build(words.out, __version__, arch, epoch))
        if "rpm" in kinds and shutil.which("rpmbuild"):
            made.append(rpm.build(words.out, __version__, arch, epoch))
        elif "rpm" in kinds:
            print("make package: no RPM: rpmbuild is missing (Debian: apt-get install rpm)", file=sys.stderr)
            failed = True
    if "image" in kinds:
        packages = [path for path in made if path.suffix in (".deb", ".rpm")]
        if not packages:
            print("make package: the image has no packages for nodes: build deb and rpm too", file=sys.stderr)
        built = image.build(words.out, __version__, words.arch or list(MACHINES), epoch, packages)
        made.append(built.path)
        base |= set(built.base)
    if "helm" in kinds:
        made += image.charts(words.out, epoch)
    lock = (ROOT / "requirements-cluster.lock").read_text()
    bill = words.out / f"topoproxy-{__version__}.cdx.json"
    bill.write_text(sbom.document(__version__, lock, made, epoch, base))
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted([*made, bill])
    ]
    (words.out / "SHA256SUMS").write_text("".join(sums))
    for path in sorted([*made, bill]):
        print(f"{path.stat().st_size:>11,}  {path}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
