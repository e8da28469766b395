"""``topoproxy check-config``: checks the configuration and shows the settings in effect."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from proxy.cli.settings import read_config, setting_options
from proxy.model.errors import HookError, TopologyError
from proxy.model.phrases import counted

if TYPE_CHECKING:
    from proxy.config import Config
    from proxy.config.hooks import HooksConfig
    from proxy.hooks.loader.directories import Candidate


@click.command()
@setting_options
@click.option(
    "--defaults", is_flag=True, help="Print all settings with their defaults and explanations instead."
)
@click.option("--schema", is_flag=True, help="Print the JSON Schema of the file (2020-12) instead.")
def check_config(file: Path | None, defaults: bool, schema: bool, **options: str | None) -> None:
    """Check a configuration and print the settings in effect.

    Takes the same options as serve. The output is itself a configuration file, with remarks as comments. Ends
    with 0 when the configuration is valid, and with 78 and the reasons when it is refused.

    \b
    Start a file of your own:
      mkdir -p /etc/topoproxy
      topoproxy check-config --defaults > /etc/topoproxy/config.yaml
    """  # noqa: D301 - click wants the real backspace
    if schema:
        from proxy.config.reference import configuration_schema

        click.echo(json.dumps(configuration_schema(), indent=1))
        return
    from proxy.config import Config, as_yaml

    if defaults:
        click.echo(as_yaml(Config()), nl=False)
        return
    # The daemon runs as root and must be able to trust the file. Another user checks a copy of it.
    config = read_config(file, options, trusted=os.geteuid() == 0)
    config = _startable(config)
    remarks = [
        f"from {config.source}",
        *_machine_remarks(config),
        _runtime_remark(config),
        *_file_remarks(file, config),
    ]
    remarks += _hook_remarks(config)
    lines = [line for remark in remarks for line in remark.splitlines()]
    click.echo("".join(f"# {line}\n" for line in lines), nl=False)
    click.echo(as_yaml(config, comments=False), nl=False)


def _startable(config: Config) -> Config:
    """Return the configuration that the daemon would start with: without cluster settings that do not fit."""
    from proxy.config.machine_checks import start_config
    from proxy.topology.reader import read_machine

    if config.without_cluster is None:
        return config
    try:
        return start_config(config, read_machine(config.sysfs_root, config.procfs_root))[0]
    except TopologyError:
        return config


def _machine_remarks(config: Config) -> Iterator[str]:
    from proxy.config import check_against
    from proxy.config.machine_checks import partly_reserved_cores
    from proxy.executor.rules_from_config import node_rules
    from proxy.topology.reader import read_machine

    try:
        machine = read_machine(config.sysfs_root, config.procfs_root)
    except TopologyError as error:
        yield f"not checked against the machine: {error}"
        return
    check_against(config, machine)
    node = node_rules(config, machine)
    floor = max((floor.least for floor in node.floors.floors if floor.node is None), default=0)
    keeps = f"; the shared pool keeps at least {floor} of them" if floor else ""
    checked = f"checked against the machine: CPUs {machine.online} are online"
    if config.reserved_cpu_amount:
        yield f"{checked}, {config.reserved_cpu_amount} of them are reserved for the system{keeps}"
    else:
        yield f"{checked}, {machine.online - node.reserved - node.withheld} can have owners{keeps}"
    if floor > (size := len(node.shareable)):
        short = f"admission.sharedFloor is {floor}, and the shared pool has {counted(size, 'CPU')}"
        yield f"note: {short}: no CPU can have an owner"
    if reason := partly_reserved_cores(config, machine):
        yield f"note: {reason}"


def _runtime_remark(config: Config) -> str:
    try:
        status = config.runtime.stat()
    except OSError as error:
        return f"note: the runtime's socket {config.runtime}: {error.strerror}"
    return "" if stat.S_ISSOCK(status.st_mode) else f"note: {config.runtime} is not a socket"


def _file_remarks(file: Path | None, config: Config) -> Iterator[str]:
    """Report files that are open to other users, and settings that can have no effect."""
    from proxy.config.checks import ineffective
    from proxy.config.files import exposed_files
    from proxy.config.load import distrust

    if reason := distrust(file):
        yield f"note: serve refuses this file as it is: {reason}"
    yield from (
        f"note: {sentence}"
        for sentence in (*exposed_files(config), *ineffective(config), *config.former_keys)
    )


def _hook_remarks(config: Config) -> Iterator[str]:
    """List the hook files, and their problems that can be found without running them."""
    from proxy.cli.hooks.file_commands import shipped
    from proxy.config.nested_values import suggestion
    from proxy.hooks.loader.directories import scan_directories

    hook_files = scan_directories(config.hooks)
    if hook_files.candidates:
        names = ", ".join(hook_files.candidates)
        yield f"hooks: {names} (topoproxy hooks list shows whether they are valid)"
    for candidate in hook_files.candidates.values():
        if why := candidate.distrust or candidate.cause or _server_distrust(candidate, config.hooks):
            yield f"note: hook {candidate.path} cannot be used: {why}"
    yield from (f"note: {sentence}" for sentence in hook_files.ignored_files)
    for name in config.hooks.settings if config.hooks.enabled else ():
        if name not in hook_files.candidates:
            if name in shipped():
                yield f"note: hooks.settings.{name}: it is not enabled: topoproxy hooks enable {name}"
            else:
                hint = suggestion(name, hook_files.candidates)
                yield f"note: hooks.settings.{name}: there is no such hook{hint}"


def _server_distrust(candidate: Candidate, hooks: HooksConfig) -> str:
    """Return why the socket of a hook server is not trusted."""
    from proxy.hooks.loader.safe_read import read_stable
    from proxy.hooks.remote.servers import socket_distrust

    if not candidate.server or candidate.is_null_link:
        return ""
    try:
        return socket_distrust(candidate.path, read_stable(candidate.path, "hook server").data, hooks)
    except HookError:  # topoproxy hooks list shows the error of the file
        return ""
