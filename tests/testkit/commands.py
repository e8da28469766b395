"""All commands of the command line."""

from __future__ import annotations

import click

from proxy.cli.main import cli


def commands(group: click.Group = cli, prefix: tuple[str, ...] = ()) -> dict[str, click.Command]:
    """Return the commands by their command lines, such as ``hooks list``."""
    found: dict[str, click.Command] = {}
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            found |= commands(command, (*prefix, name))
        else:
            found[" ".join((*prefix, name))] = command
    return found
