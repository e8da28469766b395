"""Queries the daemon's admin socket for commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from proxy.admin.client import query_admin
from proxy.cli.settings import FiniteRange, config_option, read_config
from proxy.model.errors import ConfigError, PermissionDeniedError, UnavailableError
from proxy.observe.json_access import as_map

if TYPE_CHECKING:
    from proxy.config import Config

F = TypeVar("F", bound=Callable[..., Any])

STATUS_HINT = "systemctl status topoproxy shows whether it runs"


def query_options(timeout: float = 5.0) -> Callable[[F], F]:
    """Add ``--config``, ``--admin`` and ``--timeout``; the argument is the default of the last."""

    def add(command: F) -> F:
        for option in (
            click.option(
                "--timeout",
                type=FiniteRange(0.1, 600),
                default=timeout,
                show_default=True,
                help="Seconds to wait.",
            ),
            click.option(
                "--admin",
                metavar="unix://SOCKET",
                help="The daemon's admin socket, if the configuration does not name it.",
            ),
            config_option,
        ):
            command = option(command)
        return command

    return add


def config_for(file: Path | None, admin: str | None) -> Config:
    """Return the configuration that names the daemon's admin socket.

    Args:
        file: The value of ``--config``.
        admin: The value of ``--admin``; it replaces the socket that the file names. With it, an invalid
            configuration does not prevent the query: the defaults are used instead.

    Raises:
        ConfigError, UsageError: The configuration or the option is refused.
    """
    return read_config(file, {}) if admin is None else config_or_defaults(file, admin)[0]


def config_or_defaults(file: Path | None, admin: str | None) -> tuple[Config, str]:
    """Read the configuration, for commands that compare it with the node.

    Args:
        file: The value of ``--config``.
        admin: The value of ``--admin``; it replaces the socket that the file names.

    Returns:
        The configuration and an empty text; or the defaults and the reason, if the file is refused.

    Raises:
        UsageError: ``--admin`` is refused.
    """
    try:
        return read_config(file, {"admin": admin}), ""
    except (ConfigError, PermissionDeniedError) as error:
        from proxy.config import Config, override

        defaults = Config()
        return (
            defaults if admin is None else override(defaults, {"adminSocket": ("--admin", admin)}),
            str(error),
        )


def query_daemon(
    config: Config,
    route: str,
    timeout: float,
    params: Mapping[str, str] | None = None,
    *,
    act: bool = False,
    hint: str = f"{STATUS_HINT}, --admin names another socket",
) -> object:
    """Query the daemon; see ``proxy.admin.client.query_admin``.

    Args:
        config: Names the socket.
        route: The route of the request.
        timeout: Seconds for the whole exchange.
        params: Parameters of the request.
        act: The request is an action.
        hint: The remedy if the daemon does not answer.

    Raises:
        UnavailableError, InputError, PermissionDeniedError: As for ``query_admin``.
    """
    try:
        answer = query_admin(config.admin_path, route, timeout, params, act=act)
    except UnavailableError as error:
        raise UnavailableError(f"{error} ({hint})") from error
    if act and not str(as_map(answer).get("schema")).startswith("topoproxy-"):
        raise UnavailableError(
            f"cannot query the daemon at {config.admin_path}: what answers there is not topoproxy ({hint})"
        )
    return answer
