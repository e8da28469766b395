"""Determining kubelet's CPU manager settings and allocations: polling ``/configz`` and its state file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.backends.kubelet.config_file import ConfigFile
from proxy.backends.kubelet.cpu_manager_view import KubeletSettingsReport, put_together
from proxy.backends.kubelet.fetch import fetch_configz
from proxy.backends.kubelet.manager_settings import ManagerSettings, manager_settings
from proxy.backends.kubelet.settings import KubeletError, KubeletSettings
from proxy.backends.kubelet.state_files import CPU_STATE, StateFile, StateFileContents
from proxy.model.backoff import RetryTimes
from proxy.model.grpc_status import GrpcStatus
from proxy.model.kubelet import CpuManager

if TYPE_CHECKING:
    from proxy.allocation.cpu_topology import CpuTopology


CONFIGZ = "kubelet's configz"
ASK_AGAIN_S = 60.0
"""Settings of a running kubelet change with its restart only, so one answer is good for a while."""


class KubeletCpuManagerReader:
    """Implements ``proxy.executor.ports.KubeletCpuManager``.

    ``look`` and ``refresh`` each for one thread at a time.
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
            config_file: Its configuration file; empty for ``config.yaml`` in its directory, if that is there.
            topology: Returns the machine, for reserves that are given as an amount.
            clock: Monotonic seconds.
        """
        self._settings = settings
        self._topology = topology
        self._clock = clock
        self._state = StateFile(f"{state_dir}/{CPU_STATE}")
        self._file = ConfigFile(config_file or f"{state_dir}/config.yaml")
        self._hung = RetryTimes[str](settings.rests)
        self._good_until = float("-inf")
        self._live: ManagerSettings | None = None
        self._silence = ""
        self._reported = KubeletSettingsReport()
        self._made_of: tuple[KubeletSettingsReport, StateFileContents] | None = None
        self._manager = CpuManager()

    def refresh(self) -> None:
        """Find out kubelet's settings again where that is due.

        See ``proxy.executor.ports.KubeletCpuManager``.
        """
        now = self._clock()
        if self._settings.configz and now >= self._good_until and self._hung.due(CONFIGZ, now):
            self._ask()
        problems = (self._silence,) if self._silence else ()
        reported = KubeletSettingsReport(self._live, CONFIGZ, problems, live=True)
        if self._live is None:
            try:
                reported = KubeletSettingsReport(self._file.read(), self._file.path, problems)
            except KubeletError as error:
                reported = KubeletSettingsReport(None, "", (*problems, str(error)))
        if reported != self._reported:
            self._reported = reported

    def look(self) -> CpuManager:
        """Look at the state file and give what is known; see ``proxy.executor.ports.KubeletCpuManager``."""
        reported, seen = self._reported, self._state.look()
        if self._made_of is None or self._made_of[0] is not reported or self._made_of[1] is not seen:
            self._manager = put_together(reported, seen, self._state.path, self._topology)
            self._made_of = (reported, seen)
            if reported.settings and seen.checkpoint and seen.checkpoint.policy != reported.settings.policy:
                self._good_until = float("-inf")  # it may have been started with another policy
        return self._manager

    def _ask(self) -> None:
        """Ask the running kubelet; where it does not answer now, its last answer stays in effect."""
        try:
            self._live = read_configz(self._settings)
        except KubeletError as error:
            if error.code == GrpcStatus.DEADLINE_EXCEEDED:
                self._hung.failed(CONFIGZ, self._clock())
            else:
                self._hung.succeeded(CONFIGZ)
            self._silence = str(error)
        else:
            self._hung.succeeded(CONFIGZ)
            self._silence, self._good_until = "", self._clock() + ASK_AGAIN_S


def read_configz(settings: KubeletSettings) -> ManagerSettings:
    """Read the settings of the running kubelet from its ``/configz``.

    The answer includes flags and drop-in files, and leaves out changes of files that kubelet has not loaded.

    Raises:
        KubeletError: It does not answer in time, or not with its configuration; ``code`` is
            DEADLINE_EXCEEDED where it hangs.
    """
    content = fetch_configz(settings)
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _strange(settings, f"the answer is not JSON: {error}") from None
    config = answer.get("kubeletconfig") if isinstance(answer, dict) else None
    if not isinstance(config, dict):
        raise _strange(settings, "the answer holds no kubeletconfig")
    return manager_settings(config)


def _strange(settings: KubeletSettings, cause: str) -> KubeletError:
    where = settings.configz.rpartition("@")[2]  # never a password
    return KubeletError(f"cannot use the configuration of kubelet at {where}: {cause}")
