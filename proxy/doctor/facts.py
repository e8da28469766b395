"""The facts about a node that the checks use. A fact that could not be read is None or has a reason."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class EndpointSetting(Struct, frozen=True):
    """A place that names kubelet's runtime endpoint.

    Attributes:
        place: A file, or kubelet's command line.
        endpoint: The endpoint that it names.
    """

    place: str
    endpoint: str


class ConfigurationFacts(Struct, frozen=True):
    """The configuration of topoproxy.

    Attributes:
        source: The file.
        refused: Why it cannot be used; empty if it can.
        cluster_fault: Why the settings from the cluster are ignored; empty if they are not.
        exposed: Files that other users can read or change, one sentence each.
        mode: ``passthrough``, ``observe`` or ``enforce``.
        listen, runtime: The sockets.
    """

    source: str = "built-in defaults"
    refused: str = ""
    cluster_fault: str = ""
    exposed: tuple[str, ...] = ()
    mode: str = "enforce"
    listen: str = "/run/topoproxy/cri.sock"
    runtime: str = "/run/containerd/containerd.sock"


class CgroupFacts(Struct, frozen=True):
    """The cpuset controller.

    Attributes:
        problem: Why it was not found; empty if it was.
        version: 1 or 2.
        without_cpuset: Groups of kubelet that do not enable the controller for the groups in them (v2).
    """

    problem: str = ""
    version: int = 2
    without_cpuset: tuple[str, ...] = ()


class RuntimeFacts(Struct, frozen=True):
    """The container runtime.

    Attributes:
        problem: Why it does not answer; empty if it does.
        version: Its name and version.
        driver: Its cgroup driver; empty if the runtime does not report it.
        runc: The version of runc; empty if it is not known.
    """

    problem: str = ""
    version: str = ""
    driver: str = ""
    runc: str = ""


class KubeletSetup(Struct, frozen=True):
    """kubelet, by its files and its process.

    Attributes:
        directory: Its directory; empty if there is none.
        running: The endpoint of the running kubelet's command line; None if it names none.
        effective: The file that decides on the endpoint at kubelet's next start; None if no file names one.
        driver: ``cgroupDriver`` of its configuration; empty if it is not set.
        cpu_policy: ``cpuManagerPolicy`` of its state file; empty if there is none.
        memory_policy: ``memoryManagerPolicy`` of its state file; empty if there is none.
        instance: kubeadm's ``instance-config.yaml``; None if it names no endpoint.
        overridden: Other files that name an endpoint, without effect.
    """

    directory: str = ""
    running: EndpointSetting | None = None
    effective: EndpointSetting | None = None
    driver: str = ""
    cpu_policy: str = ""
    memory_policy: str = ""
    instance: EndpointSetting | None = None
    overridden: tuple[EndpointSetting, ...] = ()


class AttachFacts(Struct, frozen=True):
    """The journal of ``topoproxy attach``.

    Attributes:
        directory: Its directory; empty if kubelet is not attached.
        problem: Why it cannot be used; empty if it can.
        unfinished: Whether the attach was interrupted, or is still running.
        changed_by_others: Files that another program has changed since the attach.
        rescue: Whether the script that undoes the attach without Python exists.
    """

    directory: str = ""
    problem: str = ""
    unfinished: bool = False
    changed_by_others: tuple[str, ...] = ()
    rescue: bool = True


class DaemonFacts(Struct, frozen=True):
    """The daemon, by its admin socket.

    Attributes:
        problem: Why it does not answer; empty if it does.
        not_ready: The reasons of the required checks that fail.
        clients: Open connections.
        pods: How many pods have containers; None in mode passthrough, in which the daemon does not know.
        last_call_s: Seconds since the last call; None if there was none.
        problems: The problems that the daemon reports.
        open_files: How many files its process may open; None if that is not known.
    """

    problem: str = ""
    not_ready: tuple[str, ...] = ()
    clients: int = 0
    pods: int | None = 0
    last_call_s: float | None = None
    problems: tuple[str, ...] = ()
    open_files: int | None = None


class StateFacts(Struct, frozen=True):
    """The state directory.

    Attributes:
        directory: Its path.
        problem: Why it cannot be used; empty if it can, or if it does not exist yet.
        free_bytes: Room on its disk; None if that is not known.
        read_only: Whether the file system is read-only.
        ledger: Why the ledger would not be used; empty if it would, or if it was not examined.
        unexamined: Why the ledger was not examined; empty if it was.
        unread: Why the directory or the ledger may not be read; empty if they may.
        set_aside: Damaged ledgers that are kept.
    """

    directory: str = "/var/lib/topoproxy"
    problem: str = ""
    free_bytes: int | None = None
    read_only: bool = False
    ledger: str = ""
    unexamined: str = ""
    unread: str = ""
    set_aside: tuple[str, ...] = ()


class SocketFacts(Struct, frozen=True):
    """A socket of the daemon.

    Attributes:
        path: Its path.
        problem: Why other users could use or replace it; empty if they cannot.
    """

    path: str
    problem: str = ""


class CertificateFacts(Struct, frozen=True):
    """A certificate that the configuration names.

    Attributes:
        path: The file.
        problem: Why it cannot be read; empty if it can.
        ends: When it expires, in seconds since the epoch.
    """

    path: str
    problem: str = ""
    ends: float = 0.0


class DoctorFacts(Struct, frozen=True):
    """Everything that the checks read.

    Attributes:
        now: Seconds since the epoch.
        machine: Why the machine cannot be read, or does not fit the configuration; empty if neither.
        partly_reserved: Why some CPUs do not count as free for owners; empty if all do.
        hooks: The problems with hook files.
        writers: Other programs on the node that write cpusets.
        denials: How many actions of the daemon SELinux or AppArmor denied; None if that is not logged.
        unread: Why a field of this class may not or cannot be read, by the name of the field.
        faults: Internal errors while a field was read, by the name of the field.
    """

    now: float
    configuration: ConfigurationFacts = ConfigurationFacts()
    machine: str = ""
    partly_reserved: str = ""
    cgroups: CgroupFacts = CgroupFacts()
    runtime: RuntimeFacts = RuntimeFacts()
    kubelet: KubeletSetup = KubeletSetup()
    attach: AttachFacts = AttachFacts()
    daemon: DaemonFacts = DaemonFacts()
    state: StateFacts = StateFacts()
    sockets: tuple[SocketFacts, ...] = ()
    certificates: tuple[CertificateFacts, ...] = ()
    hooks: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    denials: int | None = None
    unread: Mapping[str, str] = {}
    faults: Mapping[str, str] = {}
