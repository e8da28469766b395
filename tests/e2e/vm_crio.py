"""Runs a scenario on CRI-O in a virtual machine; containerd runs, too, but is not used.

    python3 vm_crio.py SCENARIO cgroupfs|systemd

The dependencies that the disk lacks are carried: CRI-O's programs, conmon, and conmon's libraries.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")

for name in ("conmon", "busybox"):
    shutil.copy(HERE / "crio-programs" / name, f"/bin/{name}")
for library in (HERE / "crio-programs").glob("*.so*"):
    if not (LIBRARIES / library.name).exists():
        shutil.copy(library, LIBRARIES / library.name)
os.environ["TOPOPROXY_CRIO"] = str(HERE / "crio-programs")

from crio import PrivateCrio  # noqa: E402  it reads the variable that is set above

scenario, driver = sys.argv[1:]
made = PrivateCrio(Path("/run/bed"), driver).start()
print(f"CRI-O listens: {made.socket}", flush=True)
try:
    settings = {**os.environ, "TOPOPROXY_RUNTIME": str(made.socket)}
    done = subprocess.run([sys.executable, str(HERE / scenario), driver], env=settings, check=False)
finally:
    shutil.copy(made.log, "/out/crio.log")
    made.stop()
sys.exit(done.returncode)
