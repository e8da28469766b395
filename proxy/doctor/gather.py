"""Reads the facts about a node for ``topoproxy doctor``. It writes nothing, and each wait has a limit.

Each source is read separately, so a source that cannot be read does not affect the others.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from proxy.admin.client import query_admin
from proxy.attach import journal as journals
from proxy.attach.node import RESCUE
from proxy.attach.state_file import ATTACHED, directory_of
from proxy.backends.cgroup.cpuset import open_cgroups
from proxy.backends.kubelet.small_file import read_small_file
from proxy.backends.runtime.client import GrpcRuntime
from proxy.config import Config, check_against
from proxy.config.files import exposed_files
from proxy.config.machine_checks import partly_reserved_cores, start_config
from proxy.doctor.certificate import expiry
from proxy.doctor.facts import (
    AttachFacts,
    CertificateFacts,
    CgroupFacts,
    ConfigurationFacts,
    DaemonFacts,
    DoctorFacts,
    KubeletSetup,
    RuntimeFacts,
    SocketFacts,
    StateFacts,
)
from proxy.doctor.file_text import file_text
from proxy.doctor.kubelet_facts import read_kubelet
from proxy.doctor.state_facts import read_state
from proxy.hooks.loader.directories import Candidate, scan_directories
from proxy.hooks.loader.examination import static_error
from proxy.model.errors import (
    CgroupError,
    ConfigError,
    PermissionDeniedError,
    RuntimeCallError,
    TopologyError,
    TopoproxyError,
    UnavailableError,
)
from proxy.model.machine import Machine
from proxy.model.workload import Phase
from proxy.observe.json_access import as_list, as_map, one_line
from proxy.permissions import TrustCheck
from proxy.topology.reader import read_machine

T = TypeVar("T")

RUNTIME_S = 2.0
"""Deadline of each request to the runtime."""
WRITERS = frozenset(
    {"koord-runtime-p", "koordlet", "cri-resmgr", "cri-resource-ma", "titus-isolate", "cpuset-manager"}
)
"""Processes that write cpusets, by ``comm``, which has at most 15 characters."""
NRI_PLUGINS = Path("/opt/nri/plugins")
AUDIT_LOG = Path("/var/log/audit/audit.log")
RUNC = tuple(Path(directory, "runc") for directory in ("/usr/local/sbin", "/usr/sbin", "/usr/bin", "/sbin"))
_RUNC_VERSION = re.compile(r"^runc version (\S+)", re.MULTILINE)
_DENIED = re.compile(rb'^.*(?:avc: +denied|apparmor="DENIED").*topoproxy.*$', re.MULTILINE)
_AUDIT_TAIL_BYTES = 1 << 20
"""How many bytes at the end of the audit log are read."""
_OPEN_FILES = re.compile(r"^Max open files\s+(\d+)", re.MULTILINE)


class NodePaths(Struct, frozen=True):
    """Paths that are checked in addition to those of the configuration; a test uses other paths.

    Attributes:
        nri: Plugins that the runtime starts.
        audit: The log of the kernel's audit.
        runc: Paths where runc may be; the first that exists counts.
        wall_clock: Seconds since the epoch.
    """

    nri: Path = NRI_PLUGINS
    audit: Path = AUDIT_LOG
    runc: tuple[Path, ...] = RUNC
    wall_clock: Callable[[], float] = time.time


def gather(config: Config, refused: str, timeout: float, node_paths: NodePaths | None = None) -> DoctorFacts:
    """Read everything.

    Args:
        config: The configuration; the defaults if it is refused.
        refused: Why it is refused; empty if it is not.
        timeout: Seconds for the answer of the daemon.
        node_paths: Other paths that are read.
    """
    node_paths = node_paths or NodePaths()
    unread: dict[str, str] = {}
    faults: dict[str, str] = {}
    read = partial(_read, unread, faults)
    no_machine: tuple[Machine | None, str, Config] = (None, "", config)
    machine, problem, config = _read(unread, faults, "machine", partial(_machine, config), no_machine)
    nothing: tuple[str, ...] = ()
    open_files = _read(unread, faults, "configuration", partial(_exposed, config), nothing)
    return DoctorFacts(
        now=node_paths.wall_clock(),
        configuration=ConfigurationFacts(
            config.source,
            refused,
            config.cluster_fault,
            open_files,
            config.mode.value,
            str(config.listen),
            str(config.runtime),
        ),
        machine=problem,
        partly_reserved="" if machine is None or problem else partly_reserved_cores(config, machine),
        cgroups=read("cgroups", lambda: _cgroups(config), CgroupFacts()),
        runtime=read("runtime", lambda: _runtime(config, node_paths), RuntimeFacts()),
        kubelet=read("kubelet", lambda: read_kubelet(config), KubeletSetup()),
        attach=read("attach", lambda: _attach(config.state_dir), AttachFacts()),
        daemon=read("daemon", lambda: _daemon(config, timeout), DaemonFacts()),
        state=read("state", lambda: read_state(config, machine), StateFacts()),
        sockets=read("sockets", lambda: tuple(_sockets(config)), ()),
        certificates=read("certificates", lambda: tuple(_certificates(config)), ()),
        hooks=read("hooks", lambda: _hooks(config), ()),
        writers=read("writers", lambda: tuple(_writers(config, node_paths)), ()),
        denials=read("denials", lambda: _denials(node_paths.audit), None),
        unread=unread,
        faults=faults,
    )


def _read(
    unread: dict[str, str], faults: dict[str, str], name: str, source: Callable[[], T], otherwise: T
) -> T:
    """Read one source; if that fails, keep the reason, so that the other sources are still read."""
    try:
        return source()
    except PermissionDeniedError as error:
        unread[name] = str(error)
    except OSError as error:
        what = error.filename or f"the facts of this check ({name})"
        unread[name] = f"cannot read {what}: {error.strerror}"
    except Exception as error:  # noqa: BLE001  a fault in one source must not hide the others
        faults[name] = f"{type(error).__name__}: {error}"
    return otherwise


def _exposed(config: Config) -> tuple[str, ...]:
    return tuple(text for text in exposed_files(config) if text != config.cluster_fault)


def _hooks(config: Config) -> tuple[str, ...]:
    hook_files = scan_directories(config.hooks)
    problems = [f"{c.path}: {why}" for c in hook_files.candidates.values() if (why := _hook_problem(c))]
    return (*problems, *hook_files.ignored_files)


def _hook_problem(candidate: Candidate) -> str:
    """Return why a hook file cannot be used; empty if its owner, mode and text show no reason."""
    if known := candidate.distrust or candidate.cause:
        return known
    if candidate.is_null_link or candidate.server:
        return ""
    try:
        data = read_small_file(str(candidate.path))[0]
    except FileNotFoundError:
        return ""  # it has just been removed
    except ValueError as error:
        return f"cannot read it: {error}"
    return static_error(candidate.path, data) if data else ""


def _machine(config: Config) -> tuple[Machine | None, str, Config]:
    """Return the machine, why it does not fit, and the configuration that the daemon would start with."""
    try:
        machine = read_machine(config.sysfs_root, config.procfs_root)
    except TopologyError as error:
        return None, str(error), config
    try:
        config, _ = start_config(config, machine)
        check_against(config, machine)
    except ConfigError as error:
        return machine, str(error), config
    return machine, "", config


def _cgroups(config: Config) -> CgroupFacts:
    try:
        groups = open_cgroups(config.cgroup_root, config.procfs_root)
    except CgroupError as error:
        return CgroupFacts(str(error))
    lacking = []
    if groups.version == 2:
        for name in ("kubepods.slice", "kubepods"):
            control = file_text(groups.root / name / "cgroup.subtree_control")
            if control is not None and "cpuset" not in control.split():
                lacking.append(f"/{name}")
    return CgroupFacts("", groups.version, tuple(lacking))


def _runtime(config: Config, node_paths: NodePaths) -> RuntimeFacts:
    runtime = GrpcRuntime(str(config.runtime), RUNTIME_S)
    try:
        version = runtime.version()
        try:
            driver = runtime.cgroup_driver()
        except (UnavailableError, RuntimeCallError):
            driver = ""
        return RuntimeFacts("", version, driver, _runc(node_paths.runc))
    except (UnavailableError, RuntimeCallError) as error:
        _require_usable(config.runtime)
        return RuntimeFacts(str(error))
    finally:
        runtime.close()


def _require_usable(path: Path) -> None:
    """Raise for a socket that this user may not use: otherwise it would look like one without a listener.

    Raises:
        PermissionDeniedError: The socket may not be used.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(RUNTIME_S)
        try:
            client.connect(str(path))
        except PermissionError as error:
            raise PermissionDeniedError(f"cannot query the runtime at {path}: {error.strerror}") from error
        except OSError:
            return


def _runc(paths: Sequence[Path]) -> str:
    """Return runc's version; empty if it is not found or does not answer."""
    path = next((each for each in paths if each.is_file()), None)
    if path is None:
        return ""
    try:
        done = subprocess.run(  # noqa: S603  the paths are constants
            [path, "--version"], capture_output=True, text=True, timeout=RUNTIME_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = _RUNC_VERSION.search(done.stdout)
    return match[1] if match else ""


def _denials(log: Path) -> int | None:
    """Count the actions of the daemon that the kernel has denied, according to the end of the audit log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _AUDIT_TAIL_BYTES))
            return len(_DENIED.findall(file.read(_AUDIT_TAIL_BYTES)))
    except OSError:
        return None


def _attach(state: Path) -> AttachFacts:
    directory = str(directory_of(state))
    try:
        journal = journals.load(state)
        changed = [] if journal is None else journals.files_changed_by_others(journal, Path("/"))
    except (PermissionDeniedError, PermissionError):
        raise
    except (TopoproxyError, OSError) as error:
        return AttachFacts(directory, str(error))
    if journal is None:
        return AttachFacts()
    names = tuple(map(str, changed))
    return AttachFacts(directory, "", journal.state != ATTACHED, names, (state / RESCUE).is_file())


def _daemon(config: Config, timeout: float) -> DaemonFacts:
    try:
        status = as_map(query_admin(config.admin_path, "/status", timeout))
    except PermissionDeniedError:
        raise
    except TopoproxyError as error:
        return DaemonFacts(str(error))
    checks = [as_map(check) for check in as_list(status.get("checks"))]
    rows = [as_map(check) for check in as_list(status.get("containers"))]
    clients, last = status.get("clients"), as_map(status.get("calls")).get("last_s")
    pods = len({row.get("pod_uid") for row in rows if row.get("phase") != Phase.EXITED.value})
    return DaemonFacts(
        not_ready=tuple(one_line(c.get("reason")) for c in checks if c.get("required") and not c.get("ok")),
        clients=clients if isinstance(clients, int) else 0,
        pods=None if status.get("mode") == "passthrough" else pods,
        last_call_s=last if isinstance(last, int | float) else None,
        problems=tuple(one_line(as_map(check).get("what")) for check in as_list(status.get("problems"))),
        open_files=_open_files(config, status),
    )


def _open_files(config: Config, status: Mapping[str, object]) -> int | None:
    match = _OPEN_FILES.search(file_text(config.procfs_root / str(status.get("pid")) / "limits") or "")
    return int(match[1]) if match else None


def _sockets(config: Config) -> Iterator[SocketFacts]:
    permissions = TrustCheck()
    for path in (config.listen, config.admin_path):
        try:
            status = path.stat()
            problem = permissions.path_problem(path, sticky=True) or permissions.owner_problem(path, status)
        except OSError:
            continue  # the daemon does not run
        if not problem and status.st_mode & stat.S_IWOTH:  # the group is that of the runtime's socket
            problem = f"others can write to {path}: chmod o-w {path}"
        if stat.S_ISSOCK(status.st_mode):
            yield SocketFacts(str(path), problem)


def _certificates(config: Config) -> Iterator[CertificateFacts]:
    path = config.kubelet.cert_file
    if path is None:
        return
    try:
        yield CertificateFacts(str(path), ends=expiry(read_small_file(str(path))[0]))
    except OSError as error:
        yield CertificateFacts(str(path), f"cannot read it: {error.strerror}")
    except ValueError as error:
        yield CertificateFacts(str(path), str(error))


def _writers(config: Config, node_paths: NodePaths) -> Iterator[str]:
    names = set()
    for entry in _entries(config.procfs_root):
        if entry.name.isdigit() and (name := (file_text(entry / "comm") or "").strip()) in WRITERS:
            names.add(f"process {name}")
    yield from sorted(names)
    for plugin in _entries(node_paths.nri):
        yield f"NRI plugin {plugin}"


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
