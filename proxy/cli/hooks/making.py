"""``topoproxy hooks new``: a hook file to fill in."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from proxy.atomic_write import write_file
from proxy.cli.hooks.shipped import TEMPLATE, template
from proxy.cli.settings import config_option, read_config
from proxy.model.errors import CannotCreateError, PermissionDeniedError, UsageError

_NAME = re.compile(r"[0-9]{2}-[a-z0-9][a-z0-9-]*")


@click.command()
@click.argument("name")
@click.option(
    "--from",
    "source",
    default=TEMPLATE,
    metavar="SHIPPED",
    help="Start from a hook that comes with topoproxy, and not from the template.",
)
@click.option(
    "--folder",
    "directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the file is made; hooks.folder of the configuration by default.",
)
@config_option
def new(name: str, source: str, directory: Path | None, file: Path | None) -> None:
    """Create a hook file from a template.

    NAME is two digits and a name, such as 50-mine: hooks are called in the order of their names. The new file
    is readable by all and writable by its owner alone, as the daemon requires; as root, in the directory of
    the configuration, a running daemon loads it at once.

    Ends with 2 for a name that cannot be used or is taken, 73 where the file cannot be created, 77 without
    permission.
    """
    name = name.removesuffix(".py")
    if not _NAME.fullmatch(name):
        hint = f"50-{name}" if _NAME.fullmatch(f"50-{name}") else "50-mine"
        form = "NN-name (two digits, -, then of a-z, 0-9 and -)"
        raise UsageError(f"cannot make hook {name}: a name is {form}, such as {hint}")
    text = template(source).read_bytes()
    place = directory or read_config(file, {}).hooks.directory
    path = place / f"{name}.py"
    make_file(path, text)
    lines = [f"made {path}; next:"]
    lines += [f"  {words}" for words in _next_steps(path)]
    click.echo("\n".join(lines))


def _next_steps(path: Path) -> list[str]:
    return [
        "topoproxy hooks points                 what it can receive, and answer",
        f"topoproxy hooks validate {path}",
        f"topoproxy hooks run {path} --example pre_create_container",
        "topoproxy hooks list                   on a node: does it run?",
    ]


def make_file(path: Path, text: bytes) -> None:
    """Make a file with mode 0644 that is there as a whole or not at all; its directory is made if need be.

    Raises:
        UsageError: There is a file already.
        PermissionDeniedError, CannotCreateError: It cannot be made.
    """
    if os.path.lexists(path.parent) and not os.path.isdir(path.parent):  # noqa: PTH112 - Path.is_dir may raise
        raise CannotCreateError(f"cannot make {path}: {path.parent} is not a directory")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_file(path, text, mode=0o644, overwrite=False)
    except FileExistsError as error:
        raise UsageError(f"cannot make {path}: it is there already") from error
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot make {path}: {error.strerror}") from error
    except OSError as error:
        raise CannotCreateError(f"cannot make {path}: {error.strerror or error}") from error
