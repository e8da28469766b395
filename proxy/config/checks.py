"""Values that are right one by one and impossible together, or on this machine."""

from __future__ import annotations

from proxy.config.schema import Config
from proxy.model.errors import ConfigError
from proxy.model.machine import Machine


def check(config: Config) -> list[str]:
    """Find settings that contradict each other.

    Returns:
        One sentence a problem, each opening with the key; empty when all is well.
    """
    problems = []
    if config.listen == config.runtime:
        problems.append(
            f"listen: {config.listen} is the runtime's own socket, and the relay would call itself"
        )
    if config.admin_path in {config.listen, config.runtime}:
        problems.append(f"adminSocket: {config.admin_path} is in use for CRI calls already")
    return problems


def check_against(config: Config, machine: Machine) -> None:
    """Refuse settings that this machine cannot meet.

    Raises:
        ConfigError: Reserved CPUs do not exist or are offline, or all CPUs are reserved.
    """
    reserved = config.reserved_system_cpus
    absent = reserved - machine.online
    if absent:
        offline = absent & machine.present
        cause = f"CPU {offline} is offline" if offline == absent else f"there is no CPU {absent - offline}"
    elif reserved and reserved == machine.online:
        cause = "all CPUs are reserved, and none is left for containers"
    else:
        return
    where = f"{config.source}: reservedSystemCPUs"
    raise ConfigError(f"cannot use the configuration {where}: {cause} (online: {machine.online})")
