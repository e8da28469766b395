"""Determines the settings and allocations of kubelet's CPU manager: polls ``/configz`` and kubelet's files.

There are three sources, the best first:

- ``/configz`` has the settings of the running kubelet.
- The configuration file, YAML or JSON, has these settings unless flags or drop-in files override them, and
  unless it was changed after kubelet read it. A setting that it does not contain has kubelet's default.
- The state file names the policy under which it was last written. kubelet does not start if this policy
  differs from its configuration (kubernetes v1.36 pkg/kubelet/cm/cpumanager/state/state_checkpoint.go,
  restoreState).

A difference between two of them is reported.

The assigned CPUs are only in the state file, and count if the file itself has policy ``static``. The file is
obsolete only if the running kubelet itself reports another policy, not if the configuration file names one:
it may be changed long before kubelet is restarted, and until the restart the assigned CPUs are in effect.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from proxy.allocation.cpu_policy import CpuPolicy, CpuStateError
from proxy.backends.kubelet.fetch import fetch_configz
from proxy.backends.kubelet.manager_settings import ManagerSettings, manager_settings
from proxy.backends.kubelet.settings import KubeletError, KubeletSettings
from proxy.backends.kubelet.small_file import FileStamp, file_stamp, read_small_file
from proxy.backends.kubelet.state_files import CPU_STATE_FILE, StateFile, StateFileContents
from proxy.model.backoff import RetryTimes
from proxy.model.errors import ConfigError
from proxy.model.grpc_status import GrpcStatus
from proxy.model.idset import CpuSet
from proxy.model.kubelet import CpuManager, Held
from proxy.model.options import CpuOptions, parse_cpu_options
from proxy.pools.go_json import load
from proxy.topology.yaml_events import read_yaml

if TYPE_CHECKING:
    from proxy.allocation.cpu_topology import CpuTopology
    from proxy.backends.kubelet.checkpoints import Checkpoint


CONFIGZ = "kubelet's configz"
QUERY_AGAIN_S = 60.0
"""Seconds for which an answer of configz is used: kubelet's settings change only when kubelet restarts."""

KIND = "KubeletConfiguration"

STATIC = "static"
_DEFAULTS = {"policy": "none", "topology_policy": "none", "topology_scope": "container"}
_NO_PODS: Held = {}
POD_LEVEL_NAME = "(pod)"
"""Used instead of a container's name for the CPUs of a pod as a whole; no container can have this name."""


class ConfigFile:
    """Kubelet's configuration file; read again when it has changed."""

    def __init__(self, path: str) -> None:
        """Store the path; nothing is opened yet."""
        self.path = path
        self._stamp: FileStamp | None = None
        self._settings: ManagerSettings | None = None
        self._failure = ""

    def read(self) -> ManagerSettings | None:
        """Return the settings in the file; None if there is no file.

        Raises:
            KubeletError: The file cannot be read, or is not a configuration of kubelet.
        """
        try:
            now = file_stamp(self.path)
            if now is None or now != self._stamp:
                self._settings, self._stamp, self._failure = None, None, ""
            if now is None:
                return None
            if self._stamp is None:
                content, self._stamp = read_small_file(self.path)
                self._settings = manager_settings(_parsed(content))
        except (OSError, ValueError, RecursionError) as error:
            cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._failure = f"cannot read kubelet's configuration {self.path}: {cause}"
        if self._failure:
            raise KubeletError(self._failure)
        return self._settings


def _parsed(content: bytes) -> dict[str, object]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
    raw = load(text, largest=None) if text.lstrip().startswith("{") else read_yaml(text)
    if not isinstance(raw, dict) or raw.get("kind", KIND) != KIND:
        raise ValueError(f"it holds no {KIND}")
    return raw


class KubeletSettingsReport(Struct, frozen=True):
    """Kubelet's settings, from kubelet or its configuration file.

    Attributes:
        settings: The settings; None if they are unknown.
        source: The source of the settings, as text.
        problems: Why a source could not be read.
        live: True if the settings are from the running kubelet.
    """

    settings: ManagerSettings | None = None
    source: str = ""
    problems: tuple[str, ...] = ()
    live: bool = False


def manager_state(
    report: KubeletSettingsReport,
    state_file: StateFileContents,
    path: str,
    topology: Callable[[], CpuTopology],
) -> CpuManager:
    """Return the state of kubelet's CPU manager.

    Args:
        report: kubelet's settings.
        state_file: The contents of the state file.
        path: The path of the state file.
        topology: Returns the machine, for reserves that are given as an amount.
    """
    settings, checkpoint = report.settings, state_file.checkpoint
    written = checkpoint.policy if checkpoint else ""
    values, sources, problems = _values(report)
    problems += [state_file.problem] if state_file.problem else []
    policy = values.get("policy", written)
    if checkpoint is not None and settings is None:
        sources["policy"] = path
    elif checkpoint is not None and written != policy:
        problems.append(
            f"kubelet's CPU manager has policy {policy} by {sources['policy']},"
            f" but {path} was written under policy {written or '?'}"
        )
    reserved, sources["reserved"], fault = _reserved(report, policy, topology)
    default, held, other = CpuSet(), _NO_PODS, ""
    if checkpoint is not None and written == STATIC and not (report.live and policy != STATIC):
        default, held, other = _held(checkpoint, path)
        sources["default"] = sources["held"] = "" if other else path
    return CpuManager(
        policy,
        (settings.options or {}) if settings else {},
        reserved,
        values.get("topology_policy", ""),
        values.get("topology_scope", ""),
        default,
        held,
        {name: source for name, source in sources.items() if source},
        (*problems, *(problem for problem in (fault, other) if problem)),
    )


def _values(report: KubeletSettingsReport) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return the settings that have a default, the sources of the settings, and the problems with them."""
    settings, problems = report.settings, [*report.problems]
    if settings is None:
        return {}, {}, problems
    values, sources = {}, {"options": report.source if settings.options is not None else ""}
    for name, default in _DEFAULTS.items():
        value = getattr(settings, name)
        values[name] = value or default
        sources[name] = report.source if value else f"kubelet's default, {report.source} does not set it"
    return (
        values,
        sources,
        [*problems, *(f"cannot use what {report.source} says of {w}" for w in settings.problems)],
    )


def _reserved(
    report: KubeletSettingsReport, policy: str, topology: Callable[[], CpuTopology]
) -> tuple[CpuSet, str, str]:
    """Return the CPUs that kubelet reserves, their source, and the problem if there is one.

    Only under policy ``static`` does kubelet convert an amount to CPUs, which its allocator chooses
    (kubernetes v1.36 pkg/kubelet/cm/cpumanager/policy_static.go, NewStaticPolicy).
    """
    settings = report.settings
    if settings is None:
        return CpuSet(), "", ""
    if settings.reserved is not None:
        return settings.reserved, report.source, ""
    if not settings.reserved_milli or policy != STATIC:
        return CpuSet(), "", ""
    amount = -(-settings.reserved_milli // 1000)
    try:
        options = parse_cpu_options(settings.options)
    except ConfigError:  # an option of a newer kubelet
        options = CpuOptions()
    try:
        cpus = CpuPolicy.of(topology(), options, None, amount).reserved
    except CpuStateError as error:
        return CpuSet(), "", f"cannot determine which {amount} CPUs kubelet reserves: {error}"
    return cpus, f"{report.source}, {amount} of them, as kubelet chooses", ""


def _held(checkpoint: Checkpoint, path: str) -> tuple[CpuSet, Held, str]:
    """Return kubelet's default set, the CPUs that it assigned to containers, and the problem if any."""
    from proxy.backends.kubelet.checkpoint_writer import pod_level_cpus
    from proxy.backends.kubelet.checkpoints import CheckpointError, held_cpus

    if checkpoint.version == 1 and checkpoint.fields.get("entries"):
        return CpuSet(), {}, f"cannot use {path}: it is of a kubelet before 1.18, and names no pods"
    try:
        assignments, pods = held_cpus(checkpoint), pod_level_cpus(checkpoint)
    except CheckpointError as error:
        return CpuSet(), {}, f"cannot use {path}: {error}"
    held = {uid: {n: c for n, c in names.items() if c} for uid, names in assignments.held.items()}
    for uid, cpus in pods.items():
        rest = cpus
        for container_cpus in held.get(uid, {}).values():
            rest -= container_cpus
        if rest:
            held.setdefault(uid, {})[POD_LEVEL_NAME] = rest
    return assignments.default, {uid: names for uid, names in held.items() if names}, ""


class KubeletCpuManagerReader:
    """Implements ``proxy.executor.ports.KubeletCpuManager``.

    Only one thread at a time may call ``read``, and one ``refresh``.
    """

    def __init__(
        self,
        settings: KubeletSettings,
        state_dir: str,
        config_file: str,
        topology: Callable[[], CpuTopology],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare the sources; nothing is opened.

        Args:
            settings: Where ``/configz`` is, and how it is queried.
            state_dir: Kubelet's directory.
            config_file: Its configuration file; empty: ``config.yaml`` in kubelet's directory, if it exists.
            topology: Returns the machine, for reserves that are given as an amount.
            clock: Monotonic seconds.
        """
        self._settings = settings
        self._topology = topology
        self._clock = clock
        self._state = StateFile(f"{state_dir}/{CPU_STATE_FILE}")
        self._file = ConfigFile(config_file or f"{state_dir}/config.yaml")
        self._retry_times = RetryTimes[str](settings.retry_backoff)
        self._configz_valid_until = float("-inf")
        self._live: ManagerSettings | None = None
        self._configz_error = ""
        self._reported = KubeletSettingsReport()
        self._manager_inputs: tuple[KubeletSettingsReport, StateFileContents] | None = None
        self._manager = CpuManager()

    def refresh(self) -> None:
        """Query kubelet's settings again, if that is due.

        See ``proxy.executor.ports.KubeletCpuManager``.
        """
        now = self._clock()
        if (
            self._settings.configz
            and now >= self._configz_valid_until
            and self._retry_times.due(CONFIGZ, now)
        ):
            self._query()
        problems = (self._configz_error,) if self._configz_error else ()
        report = KubeletSettingsReport(self._live, CONFIGZ, problems, live=True)
        if self._live is None:
            try:
                report = KubeletSettingsReport(self._file.read(), self._file.path, problems)
            except KubeletError as error:
                report = KubeletSettingsReport(None, "", (*problems, str(error)))
        if report != self._reported:
            self._reported = report

    def read(self) -> CpuManager:
        """Read the state file and return the CPU manager; see ``proxy.executor.ports.KubeletCpuManager``."""
        report, seen = self._reported, self._state.read()
        if (
            self._manager_inputs is None
            or self._manager_inputs[0] is not report
            or self._manager_inputs[1] is not seen
        ):
            self._manager = manager_state(report, seen, self._state.path, self._topology)
            self._manager_inputs = (report, seen)
            if report.settings and seen.checkpoint and seen.checkpoint.policy != report.settings.policy:
                self._configz_valid_until = float("-inf")  # kubelet may have restarted with another policy
        return self._manager

    def _query(self) -> None:
        """Query the running kubelet; if it does not answer, its last answer stays in effect."""
        try:
            self._live = read_configz(self._settings)
        except KubeletError as error:
            if error.code == GrpcStatus.DEADLINE_EXCEEDED:
                self._retry_times.failed(CONFIGZ, self._clock())
            else:
                self._retry_times.succeeded(CONFIGZ)
            self._configz_error = str(error)
        else:
            self._retry_times.succeeded(CONFIGZ)
            self._configz_error, self._configz_valid_until = "", self._clock() + QUERY_AGAIN_S


def read_configz(settings: KubeletSettings) -> ManagerSettings:
    """Read the settings of the running kubelet from its ``/configz``.

    The answer includes flags and drop-in files. It does not include changes of files that kubelet has not
    read.

    Raises:
        KubeletError: kubelet does not answer in time, or does not return its configuration; ``code`` is
            DEADLINE_EXCEEDED if it hangs.
    """
    content = fetch_configz(settings)
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _unexpected(settings, f"the answer is not JSON: {error}") from None
    config = answer.get("kubeletconfig") if isinstance(answer, dict) else None
    if not isinstance(config, dict):
        raise _unexpected(settings, "the answer holds no kubeletconfig")
    return manager_settings(config)


def _unexpected(settings: KubeletSettings, cause: str) -> KubeletError:
    where = settings.configz.rpartition("@")[2]  # never a password
    return KubeletError(f"cannot use the configuration of kubelet at {where}: {cause}")
