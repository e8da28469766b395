"""``topoproxy hooks`` and its commands."""

from __future__ import annotations

import click

from proxy.cli.hooks.file_commands import disable, enable, new, registration
from proxy.cli.hooks.list_command import list_hooks, validate
from proxy.cli.hooks.points_command import points
from proxy.cli.hooks.run_command import run


@click.group()
def hooks() -> None:
    """List, write, test, enable and disable hooks.

    A hook is a file NN-name.py with functions that are named after hook points, such as
    pre_create_container; a node runs the files in /etc/topoproxy/hooks.d and /usr/lib/topoproxy/hooks.d.
    Files that are added, changed or removed take effect within a second, without a restart. Koordinator's
    hook servers in /etc/runtime/hookserver.d are called, too.

    \b
    Use one that comes with topoproxy
      topoproxy hooks list --all                     what runs, and what could
      topoproxy hooks enable 30-cpus-file            start to call it
      topoproxy hooks disable 30-cpus-file           stop calling it

    \b
    Write one
      topoproxy hooks new 50-mine --directory .      a template to fill in
      topoproxy hooks points pre_create_container    what it receives, and what it may answer
      topoproxy hooks validate 50-mine.py            is it valid?
      topoproxy hooks run 50-mine.py --example pre_create_container      what does it do?
      install -D -m 0644 50-mine.py /etc/topoproxy/hooks.d/50-mine.py    on a node, as root
      topoproxy hooks list                           does it run, and what is wrong if not

    docs/hooks.md is the guide, docs/hook-points.md names all points.
    """  # noqa: D301 - click wants the real backspace


for _command in (list_hooks, validate, new, run, enable, disable, points, registration):
    hooks.add_command(_command)
