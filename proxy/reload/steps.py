"""The steps of a reload: the effect of each live key on the running daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy import logs
from proxy.assembly import options_of, suppression_settings, usage_of
from proxy.backends.cgroup.cfs_quota import open_cpu_groups
from proxy.config.schema import Config
from proxy.executor.rules_from_config import node_rules
from proxy.model.errors import CgroupError, ConfigError
from proxy.model.koordinator import SuppressMode
from proxy.model.mode import NodeMode
from proxy.reload.service import Commit, LiveStep

if TYPE_CHECKING:
    from proxy.executor.best_effort.suppression import Suppression
    from proxy.executor.node_executor import NodeExecutor
    from proxy.frontends.device_registration.service import DevicePluginService
    from proxy.hooks_setup import DaemonHooks

PLACEMENT = (
    "cpuManagerPolicyOptions",
    "reservedSystemCPUs",
    "kubeReserved.cpu",
    "systemReserved.cpu",
    "topologyManagerPolicy",
    "topologyManagerScope",
    "topologyManagerPolicyOptions",
    "memoryNodes",
    "koordinator",
    "admission",
)
"""Keys that become part of the node's rules (``executor.rules_from_config``)."""
READ_WHERE_USED = (
    "clusterConfig",
    "drainTimeout",
    "releaseAtStop",
    "kubeReserved.ephemeral-storage",
    "kubeReserved.pid",
    "systemReserved.ephemeral-storage",
    "systemReserved.pid",
)
"""Keys that are looked up in the running configuration, or only checked."""


def common_steps() -> list[LiveStep]:
    """Return the steps of every daemon, including one that only relays."""
    return [LiveStep(("log",), _log), LiveStep(READ_WHERE_USED, lambda before, after: lambda: None)]


def executor_steps(executor: NodeExecutor, enforced: Callable[[], None]) -> list[LiveStep]:
    """Return the steps of a daemon that decides.

    Args:
        executor: The node.
        enforced: Called when the mode becomes enforce.
    """

    def enforcement(before: Config, after: Config) -> Commit:
        mode, new = after.mode, options_of(after)
        if executor.state.mode.in_release and before.mode is not after.mode:
            raise ConfigError("cannot change the mode: the node is released (topoproxy release --undo)")

        def commit() -> None:
            executor.change_options(new)
            executor.change_enforcement(mode, new.selection)
            if mode is NodeMode.ENFORCE:
                enforced()

        return commit

    def options(before: Config, after: Config) -> Commit:
        new = options_of(after)
        return lambda: executor.change_options(new)

    def rules(before: Config, after: Config) -> Commit:
        policy = executor.node_policy
        machine = policy.configured.machine  # an amount of CPUs stays the same CPUs while some are offline
        node = node_rules(after, machine, quotas=executor.quotas.groups is not None)
        return policy.reconfigured(node, after.topology_manager_policy_options)

    timing = ("onError", "callTimeout", "settle", "reconcilePeriod", "explainHistory")
    return [
        LiveStep(timing, options),
        LiveStep(PLACEMENT, rules),
        LiveStep(("mode", "enforce"), enforcement),
    ]


def suppression_step(current: Callable[[], Suppression | None], begin: Callable[[Config], None]) -> LiveStep:
    """Return the step of BE (best effort) suppression.

    Args:
        current: Returns the part that suppresses BE pods; None if it does not exist yet.
        begin: Makes this part, if the configuration enables it.
    """

    def prepare(before: Config, after: Config) -> Commit:
        suppression, requested = current(), after.be_suppress.mode
        usage, groups = (None, None) if suppression is None else (suppression.usage, suppression.groups)
        try:
            usage = usage or usage_of(after)
            if groups is None and requested is SuppressMode.QUOTA:
                groups = open_cpu_groups(after.cgroup_root)
        except CgroupError as error:
            raise ConfigError(f"beSuppress.mode: {error}") from error
        if suppression is None:
            return lambda: begin(after)  # it opens the same files again; none is kept open
        settings = suppression_settings(after)
        return lambda: suppression.reconfigure(settings, usage, groups)

    return LiveStep(("beSuppress",), prepare)


def hooks_step(current: Callable[[], DaemonHooks | None]) -> LiveStep:
    """Return the step of hooks.

    Args:
        current: Returns the part that calls hooks; None if there is none.
    """

    def prepare(before: Config, after: Config) -> Commit:
        def change() -> None:
            if (hooks := current()) is not None:  # the same reload may have created it
                hooks.reconfigure(after.hooks)

        return change

    return LiveStep(("hooks",), prepare)


def device_plugins_step(current: Callable[[], DevicePluginService | None]) -> LiveStep:
    """Return the step of device plugins.

    Args:
        current: Returns the part that serves them; None if there is none.
    """

    def prepare(before: Config, after: Config) -> Commit:
        def change() -> None:
            if (serving := current()) is not None:
                serving.reconfigure(after.device_plugins)

        return change

    return LiveStep(("devicePlugins",), prepare)


def _log(before: Config, after: Config) -> Commit:
    return lambda: logs.log.change(after.log.level, after.log.format)
