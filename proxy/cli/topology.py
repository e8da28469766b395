"""``topoproxy topology``: shows the machine as a picture or as JSON."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import click

from proxy.cli.settings import PATH
from proxy.model.errors import UsageError

SYSFS = Path("/sys")
_PICTURE = "├└│─·…"


def to_text(facts: dict[str, object]) -> str:
    """Write facts as JSON with one row, group or node per line, so that people can read and compare them."""
    entries: list[str] = []
    for key, value in facts.items():
        if isinstance(value, dict) and key in ("numa", "llc"):
            body = ",\n".join(f"  {json.dumps(name)}: {_lines(part, '   ')}" for name, part in value.items())
            text = f"{{\n{body}\n }}" if body else "{}"
        else:
            text = _lines(value, "  ")
        entries.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}"


def _lines(value: object, indent: str) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        body = ",\n".join(f"{indent}{json.dumps(entry)}" for entry in value)
        return f"[\n{body}\n{indent[:-1]}]"
    return json.dumps(value)


def _can_draw() -> bool:
    """Return whether the terminal's encoding has the characters of the picture."""
    try:
        _PICTURE.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


@click.command("topology")
@click.option(
    "--sysfs-root",
    type=PATH,
    default=None,
    show_default="/sys",
    help="Used in place of /sys; a directory with sys and proc is accepted, too.",
)
@click.option(
    "--procfs-root",
    type=PATH,
    default=None,
    show_default="proc next to the sysfs root, so /proc",
    help="Used in place of /proc.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the machine as JSON instead of a picture.")
@click.option(
    "--machine",
    "description",
    type=PATH,
    metavar="FILE.json",
    help="Show the machine that a JSON file describes (the form that --json prints).",
)
@click.option("--ascii", "ascii_only", is_flag=True, help="Draw with ASCII characters only.")
def topology(
    sysfs_root: Path | None,
    procfs_root: Path | None,
    as_json: bool,
    description: Path | None,
    ascii_only: bool,
) -> None:
    """Show the machine: sockets, NUMA nodes, caches, cores, memory and distances."""
    from proxy.topology.description import load_machine
    from proxy.topology.facts import machine_to_json
    from proxy.topology.picture import render
    from proxy.topology.reader import read_machine

    for option, root in (("--sysfs-root", sysfs_root), ("--procfs-root", procfs_root)):
        if description and root:
            raise UsageError(f"cannot use --machine and {option} together: both name the machine")
    machine = load_machine(description) if description else read_machine(sysfs_root or SYSFS, procfs_root)
    if as_json:
        click.echo(to_text(machine_to_json(machine)))
        return
    width = shutil.get_terminal_size((100, 24)).columns
    click.echo(render(machine, width=width, ascii=ascii_only or not _can_draw()))
