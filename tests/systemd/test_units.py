"""The shipped units: their necessary settings, and that systemd accepts them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.config import DEFAULT_FILE, Config
from proxy.config.load import drop_in_directory
from proxy.sockets.unix_socket import DEFAULT_DIRECTORY, LISTEN_FD_NAME

UNITS = Path(__file__).parents[2] / "systemd"


def read(name: str) -> dict[str, dict[str, list[str]]]:
    """Read a unit file: section, key, and all values of the key."""
    sections: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in (UNITS / name).read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, found, value = line.partition("=")
            assert found, line
            section.setdefault(key, []).append(value)
    return sections


def test_the_service_notifies_systemd() -> None:
    service = read("topoproxy.service")["Service"]
    assert service["Type"] == ["notify"]
    assert service["NotifyAccess"] == ["main"]
    assert service["ExecStart"] == ["topoproxy serve"]
    assert service["ExecReload"] == ["topoproxy reload"]
    assert int(service["WatchdogSec"][0]) == 30
    assert service["Restart"] == ["always"]
    assert service["RestartPreventExitStatus"] == ["78"]
    assert float(service["TimeoutStopSec"][0]) > Config().drain_timeout
    assert service["OOMScoreAdjust"] == ["-999"]


def test_the_service_survives_the_runtime_and_starts_before_kubelet() -> None:
    unit = read("topoproxy.service")["Unit"]
    assert "containerd.service" in unit["Wants"][0].split()
    assert "containerd.service" in unit["After"][0].split()
    assert unit["Before"] == ["kubelet.service"]
    assert not {"Requires", "BindsTo", "PartOf", "Requisite"} & unit.keys()
    kubelet = read("examples/kubelet.service.d/20-topoproxy.conf")["Unit"]
    assert kubelet == {"Wants": ["topoproxy.service"], "After": ["topoproxy.service"]}


def test_cgroups_stay_writable_and_the_rest_does_not() -> None:
    service = read("topoproxy.service")["Service"]
    assert service["ProtectSystem"] == ["strict"]
    assert service["ProtectKernelTunables"] == ["yes"]
    assert not {"ProtectControlGroups", "ProtectProc", "Delegate", "PrivateNetwork"} & service.keys()
    assert service["NoNewPrivileges"] == ["yes"]


def test_large_answers_are_not_mapped_each_time() -> None:
    environment = read("topoproxy.service")["Service"]["Environment"][0].split()
    assert environment == ["MALLOC_MMAP_THRESHOLD_=8388608", "MALLOC_TRIM_THRESHOLD_=16777216"]


def test_directories_are_those_of_the_program() -> None:
    service = read("topoproxy.service")["Service"]
    config = Config()
    assert Path("/run") / service["RuntimeDirectory"][0] == DEFAULT_DIRECTORY == config.listen.parent
    assert Path("/var/lib") / service["StateDirectory"][0] == config.state_dir
    # The socket lies in the runtime directory: if that went with the service, so would the socket.
    assert service["RuntimeDirectoryPreserve"] == ["yes"]
    assert service["RuntimeDirectoryMode"] == ["0711"]
    tmpfiles = (UNITS / "tmpfiles.d/topoproxy.conf").read_text().splitlines()
    assert f"d {DEFAULT_DIRECTORY} 0711 root root -" in tmpfiles


def test_the_socket_is_the_one_that_the_program_adopts() -> None:
    section = read("topoproxy.socket")["Socket"]
    assert section["ListenStream"] == [str(Config().listen)]
    assert section["FileDescriptorName"] == [LISTEN_FD_NAME]
    assert section["SocketMode"] == ["0660"]
    assert read("topoproxy.service")["Install"]["Also"] == ["topoproxy.socket"]


def test_a_takeover_may_write_kubelets_directory_and_nothing_else() -> None:
    shipped = read("examples/topoproxy.service.d/20-takeover.conf")
    assert shipped == {"Service": {"ReadWritePaths": [str(Config().kubelet.state_dir)]}}
    assert "ReadWritePaths" not in read("topoproxy.service")["Service"]


def test_the_directories_of_the_configuration_and_of_hooks_are_created_and_private() -> None:
    service, config = read("topoproxy.service")["Service"], Config()
    directories = [Path("/etc") / name for name in service["ConfigurationDirectory"][0].split()]
    assert directories == [DEFAULT_FILE.parent, drop_in_directory(DEFAULT_FILE), config.hooks.directory]
    assert "ConfigurationDirectoryMode" not in service  # 0755, and root's


def test_the_service_cannot_write_its_configuration_and_its_hooks() -> None:
    """ConfigurationDirectory= makes each directory writable; read-only wins for the same path only."""
    service = read("topoproxy.service")["Service"]
    writable = {f"/etc/{name}" for name in service["ConfigurationDirectory"][0].split()}
    assert writable <= set(service["ReadOnlyPaths"][0].split())


def test_examples_are_not_active_if_the_directory_is_copied() -> None:
    """systemd reads UNIT.d next to a unit, and UNIT.wants; it does not read examples/UNIT.d."""
    special = re.compile(r".*\.(d|wants|requires|upholds)")
    directories = [path.name for path in UNITS.iterdir() if path.is_dir() and special.fullmatch(path.name)]
    assert directories == ["tmpfiles.d"]  # no unit has this name
    examples = sorted(str(path.relative_to(UNITS / "examples")) for path in UNITS.glob("examples/*/*"))
    assert examples == [
        "kubelet.service.d/20-topoproxy.conf",
        "topoproxy.service.d/20-takeover.conf",
        "topoproxy.service.d/30-irq-affinity.conf",
    ]


def size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([MG])", text).groups()  # type: ignore[union-attr]
    return int(number) << {"M": 20, "G": 30}[unit]


def test_the_service_has_a_memory_limit_above_what_it_may_hold() -> None:
    """MemoryHigh= is above 1,000 containers, the bodies of calls that are held, and hooks."""
    service = read("topoproxy.service")["Service"]
    high, most = size(service["MemoryHigh"][0]), size(service["MemoryMax"][0])
    assert 512 << 20 <= high < most <= 1 << 30


def test_the_service_has_only_the_capabilities_that_it_needs() -> None:
    service = read("topoproxy.service")["Service"]
    assert service["CapabilityBoundingSet"] == ["CAP_DAC_OVERRIDE CAP_SYS_NICE"]
    assert "AmbientCapabilities" not in service


def test_the_interpreter_imports_only_what_is_installed(tmp_path: Path) -> None:
    service = read("topoproxy.service")["Service"]
    given = dict(word.split("=", 1) for line in service["Environment"] for word in line.split())
    unset = {name for line in service["UnsetEnvironment"] for name in line.split()}
    assert {"PYTHONPATH", "PYTHONHOME", "LD_PRELOAD", "LD_LIBRARY_PATH"} <= unset
    assert not unset & given.keys()
    (tmp_path / "click.py").write_text("raise SystemExit('a module of the working directory was imported')")
    code = "import sys, click; print(sys.flags.safe_path, sys.flags.no_user_site, '' in sys.path)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["True", "1", "False"], "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_exposure_of_the_unit_stays_low(tmp_path: Path) -> None:
    """A copy of the whole directory is rated, so that a drop-in next to the unit would count."""
    copied = tmp_path / "systemd"
    shutil.copytree(UNITS, copied)
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", "./topoproxy.service"]
    done = subprocess.run(command, cwd=copied, capture_output=True, text=True, timeout=60, check=False)
    rated = re.search(r"exposure level for topoproxy\.service: (\d+\.\d)", done.stdout)
    if rated is None:
        pytest.skip(f"systemd-analyze cannot rate a unit here: {done.stderr.strip()[:200]}")
    assert float(rated[1]) <= 2.6, done.stdout


def test_only_a_hook_that_moves_interrupts_may_write_tunables() -> None:
    assert read("examples/topoproxy.service.d/30-irq-affinity.conf") == {
        "Service": {"ProtectKernelTunables": ["no"]}
    }


def syscalls(group: str) -> set[str]:
    """Return the system calls of one of systemd's groups of them."""
    command = ["systemd-analyze", "syscall-filter", group]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()[:200]}")
    found: set[str] = set()
    for word in (line.strip() for line in done.stdout.splitlines()[1:]):
        if word.startswith("@"):
            found |= syscalls(word)
        elif word and not word.startswith("#"):
            found.add(word)
    return found


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_necessary_system_calls_are_allowed() -> None:
    service = read("topoproxy.service")["Service"]
    assert service["SystemCallFilter"] == ["@system-service", "~@privileged @resources"]
    allowed = syscalls("@system-service") - syscalls("@privileged") - syscalls("@resources")
    runtime_events = {"inotify_init1", "inotify_add_watch", "inotify_rm_watch", "epoll_create1", "epoll_ctl"}
    reading_again = {"vfork", "clone3", "execve", "pipe2", "wait4", "waitid", "pidfd_open", "kill"}
    assert (
        runtime_events
        | reading_again
        | {"socket", "bind", "recvfrom", "pread64", "pwrite64", "flock", "fsync"}
        <= allowed
    )
    assert not {"reboot", "chown", "fchownat", "setuid", "chroot", "sched_setaffinity"} & allowed


def test_the_necessary_address_families_are_allowed() -> None:
    """Unix sockets of the runtime and systemd, TCP to kubelet, and netlink for uevents."""
    families = read("topoproxy.service")["Service"]["RestrictAddressFamilies"][0].split()
    assert sorted(families) == ["AF_INET", "AF_INET6", "AF_NETLINK", "AF_UNIX"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    text = (UNITS / "topoproxy.service").read_text()
    # The program need not be installed where systemd looks for it.
    text, count = re.subn(r"^(Exec\w+)=topoproxy", r"\1=/bin/true", text, flags=re.MULTILINE)
    assert count == 2
    (tmp_path / "topoproxy.service").write_text(text)
    shutil.copy(UNITS / "topoproxy.socket", tmp_path)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "./topoproxy.service", "./topoproxy.socket"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    reported = [line for line in done.stderr.splitlines() if "topoproxy" in line]
    if done.returncode and not reported:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()[:200]}")
    assert (done.returncode, reported) == (0, [])
