"""The scenario of the shipped units under systemd: the daemon works with their restrictions.

The directory ``systemd/`` is copied to the directory of units. Within its limits the service must place
containers, repair a cpuset that another program wrote, and survive a kill and a restart.

    python3 vm_unit.py cgroupfs|systemd
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cri import Cri
from vm_guest import ALL, LONG_S, RUNTIME, SOCKET, core_of, page_of, place_in, save_journals, step, wait
from vm_pools import GuestNode

from proxy.config import Config

OWN = core_of(max(ALL))
REST = ALL - OWN
UNITS = Path("/etc/systemd/system")
CONFIG = Path("/etc/topoproxy/config.yaml")
PROGRAM = """#!/usr/bin/python3
import sys
sys.path.insert(0, "/opt/site")
from proxy.__main__ import main
main()
"""
MIB = 1 << 20


def systemctl(*args: str) -> str:
    return subprocess.run(["systemctl", *args], check=True, capture_output=True, text=True).stdout.strip()


def unit_property(name: str) -> str:
    return systemctl("show", "--value", "-p", name, "topoproxy.service")


def main_process() -> int:
    return int(unit_property("MainPID"))


def status() -> Any:
    return page_of(Config().admin_path, "/status")


def install() -> None:
    """Install the units as the README describes; the program is a script that uses the test's packages."""
    program = Path("/usr/local/bin/topoproxy")
    program.write_text(PROGRAM)
    program.chmod(0o755)
    shutil.copytree("systemd", UNITS, dirs_exist_ok=True)
    CONFIG.parent.mkdir(mode=0o755)
    values = {"runtime": f"unix://{RUNTIME}", "callTimeout": "60s", "reconcilePeriod": "5s"}
    CONFIG.write_text(json.dumps(values))
    (UNITS / "topoproxy.service.d").mkdir()
    # Under emulation everything takes 25 times as long. PYTHONPATH in systemd's environment must be ignored.
    slow = "[Service]\nTimeoutStartSec=300\nWatchdogSec=300\nTimeoutStopSec=300\n"
    (UNITS / "topoproxy.service.d/90-slow.conf").write_text(slow)
    systemctl("set-environment", "PYTHONPATH=/nowhere", "PYTHONHOME=/nowhere")
    systemctl("daemon-reload")


def start() -> float:
    systemctl("start", "topoproxy.socket", "topoproxy.service")
    took = wait("the service to be ready", lambda: unit_property("ActiveState") == "active")
    return took + wait("the daemon to be ready", lambda: bool(status()["ready"]))


def limits() -> None:
    """Check that the process has the restrictions of the unit."""
    assert unit_property("DropInPaths").split() == [str(UNITS / "topoproxy.service.d/90-slow.conf")]
    process = Path(f"/proc/{main_process()}")
    fields = dict(line.split(":\t") for line in (process / "status").read_text().splitlines())
    held = int(fields["CapEff"], 16)
    assert held == 1 << 1 | 1 << 23, f"{held:x}"  # CAP_DAC_OVERRIDE, CAP_SYS_NICE
    assert int(fields["CapBnd"], 16) == held
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert (process / "oom_score_adj").read_text().strip() == "-999"
    environment = (process / "environ").read_text().split("\0")
    assert "PYTHONSAFEPATH=1" in environment
    assert not any(entry.startswith(("PYTHONPATH=", "PYTHONHOME=")) for entry in environment)
    assert (int(unit_property("MemoryHigh")), int(unit_property("MemoryMax"))) == (512 * MIB, 768 * MIB)
    mounts = dict[str, str]()
    for line in (process / "mounts").read_text().splitlines():
        _, at, _, options, *_ = line.split()
        mounts[at] = options.split(",")[0]  # the last mount at a path is the visible one
    assert {mounts[at] for at in ("/", "/etc/topoproxy", "/etc/topoproxy/hooks.d")} == {"ro"}, mounts
    assert {mounts[at] for at in ("/var/lib/topoproxy", "/run/topoproxy")} == {"rw"}, mounts
    for path in (CONFIG, Path("/etc/topoproxy/hooks.d/10-x.py"), Path("/proc/sys/vm/swappiness")):
        shell = ["nsenter", f"--mount={process}/ns/mnt", "sh", "-c", f"true >>{path}"]
        done = subprocess.run(shell, check=False, capture_output=True, text=True)
        assert "Read-only file system" in done.stderr, (path, done)


def main() -> None:
    assert RUNTIME.exists()
    install()
    step(f"the service is ready after {start():.1f} s")
    limits()
    step("the process has exactly the restrictions of the unit")
    node = GuestNode(sys.argv[1])
    node.run("ls")
    node.run("lse", OWN)
    node.check(("lse",), OWN, limit=LONG_S)
    node.check(("ls",), REST, limit=LONG_S)
    wait("all to be watched", lambda: status()["drift"]["watched"] == 2)
    directory = node.group("ls")
    (directory / "cpuset.cpus").write_text(str(ALL))
    wait("the written cpuset to be repaired", lambda: place_in(directory).cpus == REST)
    step("containers are placed, and a cpuset that another program wrote is repaired")
    before = main_process()
    systemctl("kill", "--kill-whom=main", "--signal=SIGKILL", "topoproxy.service")
    wait("systemd to restart the daemon", lambda: main_process() not in (0, before))
    wait("the service to be ready", lambda: unit_property("ActiveState") == "active")
    assert unit_property("NRestarts") == "1"
    node.cri = Cri(SOCKET, "")
    wait("the daemon to be ready", lambda: bool(status()["ready"]))
    assert [entry["cpus"] for entry in status()["exclusive"]] == [str(OWN)]
    node.check(("lse",), OWN, limit=LONG_S)
    node.cri.stop(node.ids["lse"])
    node.check(("ls",), ALL, limit=LONG_S)
    assert status()["problems"] == [], status()["problems"]
    step(f"after a kill it continues; it uses {int(unit_property('MemoryCurrent')) / MIB:.0f} MiB of memory")
    systemctl("stop", "topoproxy.service", "topoproxy.socket")
    assert unit_property("Result") == "success", unit_property("Result")
    step("all is given back")


if __name__ == "__main__":
    try:
        main()
    finally:
        save_journals(topoproxy="proxy.log")
