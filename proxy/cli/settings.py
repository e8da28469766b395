"""Command-line options that replace settings of the file, for every command that reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from proxy.model.errors import TopoproxyError, UsageError

if TYPE_CHECKING:
    from proxy.config import Config

F = TypeVar("F", bound=Callable[..., Any])

# Option, its argument, the key that it replaces, and its help text.
_OPTIONS = (
    ("--listen", "unix://SOCKET", "listen", "Where kubelet connects."),
    ("--runtime", "unix://SOCKET", "runtime", "The container runtime's socket."),
    ("--state-dir", "DIR", "stateDir", "The directory in which placements are kept."),
    ("--sysfs-root", "DIR", "sysfsRoot", "Used in place of /sys."),
    ("--procfs-root", "DIR", "procfsRoot", "Used in place of /proc."),
    ("--cgroup-root", "DIR", "cgroupRoot", "Used in place of /sys/fs/cgroup."),
    ("--admin", "unix://SOCKET", "adminSocket", "The socket for status and other commands."),
    (
        "--mode",
        "enforce|observe|passthrough",
        "mode",
        "Whether decisions are applied, only observed, or not made.",
    ),
    ("--cpu-manager-policy", "none|static", "cpuManagerPolicy", "Whether topoproxy gives exclusive CPUs."),
    (
        "--topology-manager-policy",
        "POLICY",
        "topologyManagerPolicy",
        "How the hints for NUMA nodes are merged.",
    ),
    (
        "--topology-manager-scope",
        "container|pod",
        "topologyManagerScope",
        "Whether NUMA nodes are chosen for a container or for a pod.",
    ),
    (
        "--memory-manager-policy",
        "None|Static",
        "memoryManagerPolicy",
        "Whether memory is reserved by NUMA node.",
    ),
    ("--explain-history", "NUMBER", "explainHistory", "How many decisions are kept for topoproxy explain."),
    ("--kubelet-pods", "https://HOST:PORT", "kubelet.pods", "Where kubelet's /pods is read."),
    ("--pods-api", "unix://SOCKET", "kubelet.podsApi", "The socket of kubelet's pods API."),
    (
        "--pod-resources",
        "unix://SOCKET",
        "kubelet.podResources",
        "The socket of kubelet's pod-resources API.",
    ),
    ("--log-level", "LEVEL", "log.level", "debug, info, warning or error."),
    ("--log-format", "FORMAT", "log.format", "text, klog or json."),
)


class FiniteRange(click.FloatRange):
    """A range of numbers; ``nan`` compares false with every bound, so click's own range accepts it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert the text of an option, and refuse values that are no finite number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


PATH = click.Path(path_type=Path, readable=False)
"""A path. The code that opens it reports an error if it cannot be read."""
_BY_PARAMETER = {option[2:].replace("-", "_"): (option, key) for option, _, key, _ in _OPTIONS}
_DIRECTORIES = {"stateDir", "sysfsRoot", "procfsRoot", "cgroupRoot"}


def config_option(command: F) -> F:
    """Add ``--config``."""
    add = click.option(
        "--config",
        "file",
        type=PATH,
        metavar="FILE",
        help="The configuration; /etc/topoproxy/config.yaml (which may be missing) by default.",
    )
    return add(command)


def setting_options(command: F) -> F:
    """Add ``--config`` and the options that replace its settings."""
    for option, metavar, key, text in reversed(_OPTIONS):
        command = click.option(option, metavar=metavar, help=f"{text} Replaces {key} of the configuration.")(
            command
        )
    return config_option(command)


def refuse_settings(options: Mapping[str, str | None], action: str, reason: str) -> None:
    """Refuse options that would be ignored.

    Args:
        options: Options of ``setting_options``, by parameter name; None for those that were not given.
        action: What cannot be done, such as ``release``.
        reason: Why they have no effect, such as ``without --offline``.

    Raises:
        UsageError: One of them was given.
    """
    given = [_BY_PARAMETER[parameter][0] for parameter, text in options.items() if text is not None]
    if given:
        have = "has" if len(given) == 1 else "have"
        raise UsageError(f"cannot {action}: {' and '.join(given)} {have} no effect {reason}")


def missing_library_error(program: str, error: ImportError) -> TopoproxyError:
    """Return the error that a library of requirements-cluster.lock is missing.

    Args:
        program: The program that needs it.
        error: The failed import.
    """
    return TopoproxyError(
        f"cannot run {program}: {error.name} is not installed: the packages do not contain it; "
        "use the container image, or a clone with requirements-cluster.lock (docs/cluster.md)"
    )


def absolute_path(option: str, directory: str) -> str:
    """Return the absolute path of a directory that the command line names, which may be relative.

    Raises:
        UsageError: It is relative, and the current directory was removed.
    """
    try:
        return str(Path(directory).absolute())
    except FileNotFoundError:
        raise UsageError(f"cannot use {option} {directory}: the current directory was removed") from None


def read_config(file: Path | None, options: dict[str, str | None], *, trusted: bool = False) -> Config:
    """Read the configuration file; options of the command line take precedence over it.

    Args:
        file: The value of ``--config``.
        options: The options of ``setting_options``, by parameter name.
        trusted: As for ``load``.

    Raises:
        ConfigError: The file is refused.
        UsageError: An option is refused.
    """
    from proxy.config import load, override
    from proxy.config.frozen_mapping import FrozenMapping
    from proxy.config.origin import Origin

    values: dict[str, tuple[str, str]] = {}
    for parameter, text in options.items():
        option, key = _BY_PARAMETER[parameter]
        if text and key in _DIRECTORIES:
            text = absolute_path(option, text)
        if text is not None:
            values[key] = (option, text)
    config = override(load(file, trusted=trusted), values)
    return replace(config, origin=Origin(file, FrozenMapping(values), trusted))
