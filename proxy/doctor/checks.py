"""The checks of ``topoproxy doctor``: pure functions from the facts of a node to findings.

Each check has an id that never changes. A check that cannot be made on this node (kubelet has no files here,
or the daemon does not answer) is skipped and says why. A warning does not mean that the node is broken: it
works, but should be examined.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from enum import StrEnum

from msgspec import Struct, structs

from proxy.doctor.facts import DoctorFacts, EndpointSetting
from proxy.model.phrases import counted

EARLIEST_CLOCK_S = 1_750_000_000.0
"""Seconds since the epoch (June 2025): a clock before that was never set."""
FAIL_BELOW_BYTES, WARN_BELOW_BYTES = 16 << 20, 256 << 20
"""Bytes free on the disk of the ledger: below the first the check fails, below the second it warns."""
LEAST_OPEN_FILES = 1024
"""Open files of the daemon: each connection and each watched cgroup takes one."""
EXPIRES_S = 14 * 86400.0
"""A certificate should be renewed within this many seconds before it expires."""
OLDEST_CONTAINERD, FIXED_RUNC = (1, 6, 0), (1, 1, 6)
"""The first containerd that is supported; the first runc that sends CPUs to systemd in the right order."""
WITHOUT_CALLS_S = 300.0
"""Seconds without a call after which a check warns: kubelet lists containers several times a minute."""


_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
AS_ROOT = "run topoproxy doctor as root"
NO_KUBELET = "kubelet has no directory here"


class CheckResult(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


class Finding(Struct, frozen=True):
    """What a check has found.

    Attributes:
        id: The check.
        result: How it ended.
        text: The result, in one sentence without a period.
        advice: What to do; empty if nothing has to be done.
    """

    id: str
    result: CheckResult
    text: str
    advice: str = ""

    def data(self) -> dict[str, object]:
        """Return the finding as plain data, for JSON."""
        return {"id": self.id, "result": self.result.value, "text": self.text, "advice": self.advice}


Outcome = tuple[CheckResult, str, str]
OK, WARN, FAIL, SKIP = CheckResult.OK, CheckResult.WARN, CheckResult.FAIL, CheckResult.SKIP


def examine(facts: DoctorFacts, ignored: Collection[str] = ()) -> list[Finding]:
    """Make all checks.

    Args:
        facts: The facts that were read.
        ignored: Checks that are skipped.
    """
    findings = [Finding(name, *_outcome(name, facts)) for name in CHECKS]
    return [
        structs.replace(finding, result=SKIP, text=f"ignored: {finding.text}", advice="")
        if finding.id in ignored
        else finding
        for finding in findings
    ]


def _outcome(name: str, facts: DoctorFacts) -> Outcome:
    """Make one check; a fact that cannot be read, or a fault of the check itself, becomes its result."""
    source = _SOURCES.get(name, "")
    if why := facts.unread.get(source):
        return WARN, why, AS_ROOT
    fault = facts.faults.get(source, "")
    if not fault:
        try:
            return CHECKS[name](facts)
        except Exception as error:  # noqa: BLE001  the other checks must still be shown
            fault = f"{type(error).__name__}: {error}"
    return FAIL, f"cannot make this check: internal error: {fault}", "please report this"


def _configuration(facts: DoctorFacts) -> Outcome:
    configuration = facts.configuration
    if configuration.refused:
        return (
            FAIL,
            configuration.refused,
            "correct the file; topoproxy check-config shows whether it is valid",
        )
    if configuration.cluster_fault:
        return WARN, configuration.cluster_fault, "change the TopoproxyConfig that selects this node"
    return OK, f"the configuration ({configuration.source}) is valid, mode {configuration.mode}", ""


def _exposed_files(facts: DoctorFacts) -> Outcome:
    exposed = facts.configuration.exposed
    if not exposed:
        return OK, "no file that the configuration names is open to other users", ""
    return WARN, "; ".join(exposed), "let only root read secrets and write these files"


def _machine(facts: DoctorFacts) -> Outcome:
    if facts.machine:
        return (
            FAIL,
            facts.machine,
            "topoproxy topology shows the machine; change the settings that do not fit",
        )
    if facts.partly_reserved:
        return WARN, facts.partly_reserved, "reserve all CPUs of a core, here and in kubelet's configuration"
    return OK, "the machine can be read and fits the configuration", ""


def _cgroup_cpuset(facts: DoctorFacts) -> Outcome:
    cgroups = facts.cgroups
    if cgroups.problem:
        return FAIL, cgroups.problem, "the kernel needs CONFIG_CPUSETS; see cgroup_disable in /proc/cmdline"
    if cgroups.without_cpuset:
        groups = ", ".join(cgroups.without_cpuset)
        return (
            FAIL,
            f"the cpuset controller is not enabled for the groups in {groups}",
            "kubelet enables it when it starts: restart kubelet",
        )
    return OK, f"cgroup v{cgroups.version} has the cpuset controller", ""


def _cgroup_driver(facts: DoctorFacts) -> Outcome:
    """Compare the drivers that kubelet's configuration and the runtime name.

    kubelet 1.31 and later uses the driver that the runtime reports; if there is one, it ignores its own
    cgroupDriver (feature gate KubeletCgroupDriverFromCRI, on by default since 1.31 and always since 1.34;
    kubernetes v1.34 pkg/features/kube_features.go).
    """
    kubelet, runtime = facts.kubelet.driver, facts.runtime.driver
    if not kubelet or not runtime:
        missing = "kubelet's configuration" if not kubelet else "the runtime"
        return SKIP, f"{missing} does not name the cgroup driver", ""
    if kubelet != runtime:
        message = f"kubelet's configuration names the cgroup driver {kubelet}, the runtime uses {runtime}"
        message += ": kubelet 1.31 and later use the runtime's, an older one fails"
        return WARN, message, f"set cgroupDriver of kubelet to {runtime}"
    return OK, f"kubelet and the runtime have the cgroup driver {kubelet}", ""


def _runtime(facts: DoctorFacts) -> Outcome:
    if facts.runtime.problem:
        where = facts.configuration.runtime
        return (
            FAIL,
            facts.runtime.problem,
            f"start the runtime, or correct the setting runtime of the configuration (now {where})",
        )
    return OK, f"{facts.runtime.version} answers at {facts.configuration.runtime}", ""


def _runtime_version(facts: DoctorFacts) -> Outcome:
    runtime = facts.runtime
    if runtime.problem:
        return SKIP, "the runtime does not answer", ""
    name, _, version = runtime.version.partition(" ")
    if name == "containerd" and _version_numbers(version) < OLDEST_CONTAINERD:
        return FAIL, f"{runtime.version} is too old", "install containerd 1.6 or later"
    driver = runtime.driver or facts.kubelet.driver
    # On cgroup v1 systemd does not write cpusets.
    systemd = facts.cgroups.version == 2 and driver != "cgroupfs"
    if runtime.runc and systemd and _version_numbers(runtime.runc) < FIXED_RUNC:
        known = "" if driver == "systemd" else ", if the cgroup driver is systemd"
        return (
            WARN,
            f"runc {runtime.runc} sends wrong CPUs to systemd{known}, which are corrected after each start",
            "install runc 1.1.6 or later",
        )
    return OK, f"{runtime.version} has no known fault", ""


def _version_numbers(version: str) -> tuple[int, ...]:
    """Read a version such as ``v1.6.20~ds1``; one that cannot be read counts as newer than all others."""
    match = _VERSION.match(version)
    return tuple(map(int, match.groups())) if match else (1 << 30,)


def _kubelet_endpoint(facts: DoctorFacts) -> Outcome:
    kubelet, listen = facts.kubelet, facts.configuration.listen
    if not kubelet.directory and kubelet.running is None:
        return SKIP, NO_KUBELET, ""
    advice = f"topoproxy attach sets unix://{listen} in the file that is in effect, and restarts kubelet"
    if facts.attach.directory:
        advice = "topoproxy attach sets it again, and restarts kubelet"
    if kubelet.running is not None and not _names_socket(kubelet.running, listen):
        return FAIL, f"{kubelet.running.place} names {kubelet.running.endpoint}", advice
    effective, instance = kubelet.effective, kubelet.instance
    if effective is None and kubelet.running is None:
        return FAIL, f"no file in {kubelet.directory} names a runtime endpoint that is in effect", advice
    if effective is not None and not _names_socket(effective, listen):
        return FAIL, f"{effective.place} names {effective.endpoint}", advice
    if instance is not None and not _names_socket(instance, listen):
        message = f"{instance.place} names {instance.endpoint}: kubeadm upgrade writes it to config.yaml"
        return WARN, message, advice
    others = [setting for setting in kubelet.overridden if not _names_socket(setting, listen)]
    notes = [f"; {other.place} names {other.endpoint}, which has no effect" for other in others]
    return OK, f"kubelet uses unix://{listen}{''.join(notes)}", ""


def _attach_journal(facts: DoctorFacts) -> Outcome:
    attach = facts.attach
    if attach.problem:
        return FAIL, attach.problem, "detach by hand: kubelet's endpoint is in the check kubelet-endpoint"
    if not attach.directory:
        return OK, "kubelet is not attached by topoproxy attach: there is no journal", ""
    if attach.unfinished:
        message = (
            f"the journal in {attach.directory} is of an attach that was cut off, or that is running now"
        )
        return FAIL, message, "topoproxy attach undoes it and attaches again; topoproxy detach undoes it"
    if attach.changed_by_others:
        message = f"another program changed {', '.join(attach.changed_by_others)} since topoproxy attach"
        return WARN, message, "topoproxy detach --dry-run shows what --force would change there"
    if not attach.rescue:
        message = f"the script rescue-detach is missing next to {attach.directory}"
        return WARN, message, "rescue-detach.sh of the package undoes an attach without Python: copy it there"
    return OK, f"the journal of the attach in {attach.directory} is complete", ""


def _names_socket(setting: EndpointSetting, listen: str) -> bool:
    return setting.endpoint.removeprefix("unix://") == listen


def _cpu_manager(facts: DoctorFacts) -> Outcome:
    static = [
        name
        for name, policy in (
            ("cpuManagerPolicy", facts.kubelet.cpu_policy),
            ("memoryManagerPolicy", facts.kubelet.memory_policy),
        )
        if policy.lower() == "static"
    ]
    if not facts.kubelet.directory:
        return SKIP, NO_KUBELET, ""
    if not static:
        return OK, "kubelet's CPU manager and memory manager assign nothing", ""
    return (
        WARN,
        f"kubelet has {' and '.join(static)} static: two programs assign CPUs",
        "topoproxy takeover plan shows how to take the node over without a drain",
    )


def _daemon(facts: DoctorFacts) -> Outcome:
    if facts.daemon.problem:
        return FAIL, facts.daemon.problem, "systemctl status topoproxy shows whether it runs, and why not"
    if facts.daemon.not_ready:
        return (
            FAIL,
            f"the daemon is not ready: {'; '.join(facts.daemon.not_ready)}",
            "topoproxy status has details",
        )
    return OK, "the daemon answers and is ready", ""


def _kubelet_calls(facts: DoctorFacts) -> Outcome:
    daemon = facts.daemon
    if daemon.problem:
        return SKIP, "the daemon does not answer", ""
    advice = "see the check kubelet-endpoint; restart kubelet after a change of its endpoint"
    if not daemon.clients:
        if daemon.pods is None:
            return SKIP, "no client is connected, and pods are not known in mode passthrough", ""
        if not daemon.pods:
            return SKIP, "no client is connected, and there are no pods", ""
        return FAIL, f"no client is connected, although there are {counted(daemon.pods, 'pod')}", advice
    if daemon.last_call_s is None or daemon.last_call_s > WITHOUT_CALLS_S:
        ago = "since its start" if daemon.last_call_s is None else f"for {daemon.last_call_s:.0f} s"
        return WARN, f"{counted(daemon.clients, 'client')} connected, but no call {ago}", advice
    return OK, f"{counted(daemon.clients, 'client')}, last call {daemon.last_call_s:.0f} s ago", ""


def _problems(facts: DoctorFacts) -> Outcome:
    daemon = facts.daemon
    if daemon.problem:
        return SKIP, "the daemon does not answer", ""
    if not daemon.problems:
        return OK, "the daemon reports no problem", ""
    first, more = daemon.problems[0], len(daemon.problems) - 1
    return WARN, f"{first}{f' and {more} more' if more else ''}", "topoproxy status lists all problems"


def _open_files(facts: DoctorFacts) -> Outcome:
    limit = facts.daemon.open_files
    if limit is None:
        return SKIP, "the limits of the daemon's process cannot be read", ""
    if limit < LEAST_OPEN_FILES:
        return (
            FAIL,
            f"the daemon may open {limit} files only",
            f"set LimitNOFILE to {LEAST_OPEN_FILES} or more in its unit",
        )
    return OK, f"the daemon may open {limit} files", ""


def _other_writers(facts: DoctorFacts) -> Outcome:
    if not facts.writers:
        return OK, "no other program is known that writes cpusets", ""
    return (
        WARN,
        f"other programs may write cpusets: {', '.join(facts.writers)}",
        "let one program place containers; topoproxy status shows conflicts under drift",
    )


def _denials(facts: DoctorFacts) -> Outcome:
    if facts.denials is None:
        return SKIP, "there is no audit log that can be read", ""
    if facts.denials:
        return (
            WARN,
            f"SELinux or AppArmor denied the daemon {counted(facts.denials, 'action')}",
            "ausearch -m avc,apparmor shows them; allow them in the policy of the daemon",
        )
    return OK, "the audit log has no denial of the daemon", ""


def _hook_files(facts: DoctorFacts) -> Outcome:
    if facts.hooks:
        return FAIL, "; ".join(facts.hooks), "topoproxy hooks list shows all hooks and their states"
    return OK, "all hook files can be used", ""


def _disk(facts: DoctorFacts) -> Outcome:
    state, advice = facts.state, "placements must be written: make room, or set stateDir to another disk"
    if state.problem or state.read_only:
        return FAIL, state.problem or f"the file system of {state.directory} is read-only", advice
    if state.free_bytes is None:
        return SKIP, f"the free space for {state.directory} is not known", ""
    message = f"{state.free_bytes >> 20} MiB are free for {state.directory}"
    if state.free_bytes < WARN_BELOW_BYTES:
        return (FAIL if state.free_bytes < FAIL_BELOW_BYTES else WARN), message, advice
    return OK, message, ""


def _ledger(facts: DoctorFacts) -> Outcome:
    state = facts.state
    if state.problem:
        return SKIP, f"the directory {state.directory} cannot be examined", ""
    if state.unread:
        return WARN, state.unread, AS_ROOT
    if state.ledger:
        return (
            FAIL,
            f"the ledger in {state.directory} would not be used: {state.ledger}",
            "the next start keeps it under another name and queries the runtime instead",
        )
    if state.set_aside:
        message = f"{counted(len(state.set_aside), 'ledger')} set aside in {state.directory}"
        return (
            WARN,
            f"{message}: {', '.join(state.set_aside)}",
            "remove the files once you know the reason; the log of that start has it",
        )
    if state.unexamined:
        return SKIP, state.unexamined, ""
    return OK, "the ledger can be used", ""


def _socket_modes(facts: DoctorFacts) -> Outcome:
    problems = [socket.problem for socket in facts.sockets if socket.problem]
    if not facts.sockets:
        return SKIP, "the daemon has no sockets: it does not run", ""
    if problems:
        return (
            FAIL,
            "; ".join(problems),
            "access to these sockets is control over the node: let only root use them",
        )
    return OK, "other users can neither use nor replace the daemon's sockets", ""


def _clock(facts: DoctorFacts) -> Outcome:
    if facts.now < EARLIEST_CLOCK_S:
        return FAIL, "the clock of the node was never set", "start a time service such as chrony"
    return OK, "the clock of the node is set", ""


def _certificates(facts: DoctorFacts) -> Outcome:
    advice = "renew it; the daemon reads the new file by itself"
    for certificate in facts.certificates:
        if certificate.problem:
            return FAIL, f"{certificate.path}: {certificate.problem}", "name a PEM file with a certificate"
        if certificate.ends <= facts.now:
            return FAIL, f"the certificate {certificate.path} has expired", advice
        if certificate.ends - facts.now < EXPIRES_S:
            days = (certificate.ends - facts.now) / 86400
            return WARN, f"the certificate {certificate.path} expires in {days:.0f} days", advice
    if not facts.certificates:
        return SKIP, "the configuration names no certificate", ""
    return OK, "all certificates are valid", ""


CHECKS: dict[str, Callable[[DoctorFacts], Outcome]] = {
    "configuration": _configuration,
    "exposed-files": _exposed_files,
    "machine": _machine,
    "cgroup-cpuset": _cgroup_cpuset,
    "runtime": _runtime,
    "runtime-version": _runtime_version,
    "cgroup-driver": _cgroup_driver,
    "kubelet-endpoint": _kubelet_endpoint,
    "attach-journal": _attach_journal,
    "kubelet-managers": _cpu_manager,
    "daemon": _daemon,
    "kubelet-calls": _kubelet_calls,
    "daemon-problems": _problems,
    "open-files": _open_files,
    "other-writers": _other_writers,
    "denials": _denials,
    "hook-files": _hook_files,
    "disk": _disk,
    "ledger": _ledger,
    "socket-modes": _socket_modes,
    "clock": _clock,
    "certificates": _certificates,
}
"""All checks, in the order in which they are shown."""
_SOURCES = {
    "exposed-files": "configuration",
    "machine": "machine",
    "cgroup-cpuset": "cgroups",
    "runtime": "runtime",
    "runtime-version": "runtime",
    "cgroup-driver": "kubelet",
    "kubelet-endpoint": "kubelet",
    "attach-journal": "attach",
    "kubelet-managers": "kubelet",
    "daemon": "daemon",
    "kubelet-calls": "daemon",
    "daemon-problems": "daemon",
    "open-files": "daemon",
    "other-writers": "writers",
    "denials": "denials",
    "hook-files": "hooks",
    "disk": "state",
    "ledger": "state",
    "socket-modes": "sockets",
    "certificates": "certificates",
}
"""The field of the facts that a check reads first."""
