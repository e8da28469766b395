"""``topoproxy hooks validate``: is a file good, before it is on a node."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from proxy.cli.hooks.listing import span
from proxy.cli.settings import config_option, read_config
from proxy.model.errors import HookError, InputError

if TYPE_CHECKING:
    from proxy.config.schema import HooksConfig


@click.command(short_help="Check hook files as the daemon would.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--untrusted", is_flag=True, help="Do not check the owner and the permissions of the file.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@config_option
def validate(files: tuple[Path, ...], file: Path | None, untrusted: bool, as_json: bool) -> None:
    """Check hook files as the daemon would: name, owner and mode, content, handlers, settings.

    FILE is a hook (NN-name.py), which is run, but not asked anything, or names a hook server (*json). Its
    settings are those that the configuration has for a hook of its name. Only root may be able to write a
    hook file and the directories that it is in; --untrusted leaves that for the node.

    Ends with 0 when all files are good, with 65 and the reasons when one is not.
    """
    config = read_config(file, {}).hooks
    found = [checked(path, config, trusted=not untrusted) for path in files]
    if as_json:
        click.echo(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        for reported in found:
            click.echo("\n".join(_lines(reported)))
    if bad := [str(reported["path"]) for reported in found if reported["error"]]:
        some = f"{len(bad)} of {len(files)} hook files" if len(files) > 1 else "the hook file"
        raise InputError(f"cannot use {some}: see above")


def checked(path: Path, config: HooksConfig, *, trusted: bool) -> dict[str, Any]:
    """Say of a file what the daemon would make of it.

    Args:
        path: The file.
        config: What is configured for hooks.
        trusted: Only root may have written it.

    Returns:
        ``path``, ``name``, ``state``, ``error`` (empty if it is good), and of a good one ``points``,
        ``policy``, ``timeout`` and ``settings``.
    """
    from proxy.cli.hooks.offline import LOADS, examined
    from proxy.hooks.files.entries import State
    from proxy.hooks.files.folders import alone

    reported: dict[str, Any] = {"path": str(path), "name": "", "state": "broken", "error": "", "settings": []}
    try:
        found = examined(alone(path), config, trusted=trusted)
    except HookError as error:
        return reported | {"error": str(error)}
    entry = found.entry
    state = LOADS if entry.state is State.RUNNING else str(entry.state)
    reported |= {"name": entry.name, "state": state, "error": entry.error, "settings": found.settings}
    if entry.points:
        reported |= {"points": list(entry.points), "policy": entry.policy, "timeout": entry.timeout}
    return reported


def _lines(reported: dict[str, Any]) -> Iterator[str]:
    good = not reported["error"] and bool(reported.get("points"))
    yield f"{reported['path']}: {'good' if good else reported['state']}"
    if reported["error"]:
        yield f"  {reported['error']}"
        return
    if not reported.get("points"):
        yield f"  it disables a hook {reported['name']} of hooks.vendorFolder"
        return
    yield from textwrap.wrap(
        ", ".join(reported["points"]), 100, initial_indent="  handles   ", subsequent_indent=" " * 12
    )
    yield f"  timeout   {span(reported['timeout'])}"
    yield f"  policy    {reported['policy']}"
    for at, key in enumerate(reported["settings"]):
        title = "settings" if not at else ""
        wants = ": ".join(part for part in (key["wants"], key["help"]) if part)
        yield f"  {title:9} {key['name']}={key['value']}  ({wants})"
