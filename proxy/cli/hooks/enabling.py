"""``topoproxy hooks enable`` and ``disable``: links in the directory of hooks, and nothing else."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

import click

from proxy.cli.hooks.shipped import full_name, shipped
from proxy.cli.settings import config_option, read_config
from proxy.config.schema import HooksConfig
from proxy.model.errors import CannotCreateError, PermissionDeniedError, TopoproxyError, UsageError

MASK = Path("/dev/null")
SOON = "a daemon that runs follows within a second: topoproxy hooks list"


@click.command(short_help="Let a hook run.")
@click.argument("name")
@config_option
def enable(name: str, file: Path | None) -> None:
    """Enable a hook that comes with topoproxy, or that was disabled.

    NAME is as topoproxy hooks list --all shows it; its number may be left out. In hooks.folder a link to the
    file is created; a mask there (a link to /dev/null, an empty file) is removed.

    Ends with 1 where a directory has its name, 2 where there is no such hook, 73 where the link cannot be
    created, 77 without permission.
    """
    hooks = read_config(file, {}).hooks
    name = full_name(
        name, {**_files(hooks.directory), **_files(hooks.vendor_directory), **shipped()}, "enable"
    )
    ours, theirs = hooks.directory / f"{name}.py", hooks.vendor_directory / f"{name}.py"
    brought = _is_there(theirs) and not _is_mask(theirs)
    masked = _is_mask(ours) or _leads_nowhere(ours)
    if not masked and _is_there(ours):
        if not os.path.isfile(ours):  # noqa: PTH113 - Path.is_file raises without permission
            raise TopoproxyError(f"cannot enable {name}: {ours} is not a file; remove it, or rename it")
        click.echo(f"{name} is enabled already: {_shown(ours)}")
    elif not masked and brought:
        click.echo(f"{name} is enabled already: {_shown(theirs)}")
    elif brought:
        _change(ours, None)
        click.echo(f"enabled {name}: {_shown(theirs)} is masked no more\n{_next(hooks)}")
    elif name in shipped():
        _change(ours, shipped()[name])
        click.echo(f"enabled {name}: {_shown(ours)}\n{_next(hooks)}")
        _warn(ours)
    elif _is_there(ours) and not _leads_nowhere(ours):
        raise UsageError(f"cannot enable {name}: {ours} masks a file that is nowhere; remove it")
    elif not _is_there(ours):
        raise UsageError(f"cannot enable {name}: {theirs} is empty, and so disables it")
    else:
        raise UsageError(f"cannot enable {name}: {_shown(ours)} leads nowhere; remove it, or mend the link")


@click.command()
@click.argument("name")
@config_option
def disable(name: str, file: Path | None) -> None:
    """Disable a hook.

    A link that topoproxy hooks enable has created is removed; a file in hooks.vendorFolder is masked by a
    link to /dev/null of the same name in hooks.folder. A file of your own in hooks.folder is not touched.

    Ends with 1 where the hook is a file of your own or a server, 2 where there is no such hook, 73 where the
    link cannot be created, 77 without permission.
    """
    hooks = read_config(file, {}).hooks
    known = {**_files(hooks.directory), **_files(hooks.vendor_directory)}
    servers = {path.stem: path for path in _entries(hooks.server_directory, "*json")}
    name = full_name(name, {**shipped(), **known, **servers}, "disable")
    ours, theirs = hooks.directory / f"{name}.py", hooks.vendor_directory / f"{name}.py"
    if name in servers and name not in known:
        raise TopoproxyError(f"cannot disable {name}: {servers[name]} names a server; remove that file")
    if _is_mask(ours) or name not in known:
        click.echo(f"{name} is not enabled")
        return
    if ours.exists() and not ours.is_symlink():
        advice = f"rename it, for example to {ours.name}.off"
        raise TopoproxyError(f"cannot disable {name}: {ours} is a file of your own; {advice}")
    _change(ours, MASK if _is_there(theirs) else None)
    said = f"{_shown(ours)} masks {theirs}" if _is_there(theirs) else f"the link {ours} is removed"
    click.echo(f"disabled {name}: {said}\n{_next(hooks)}")


def _next(hooks: HooksConfig) -> str:
    return SOON if hooks.enabled else "hooks.enabled is false in the configuration: no hook runs"


def _warn(link: Path) -> None:
    """Say so if the daemon will not run what was enabled."""
    from proxy.hooks.files.folders import alone

    if lack := alone(link).lack:
        click.echo(f"note: the daemon will not run it: {lack}", err=True)


def _files(directory: Path) -> dict[str, Path]:
    """Return the hook files of a directory by name, masks too."""
    return {path.stem: path for path in _entries(directory, "*.py")}


def _entries(directory: Path | None, pattern: str) -> list[Path]:
    """Return what is in a directory; nothing where there is none.

    Raises:
        PermissionDeniedError: One may not look.
    """
    if directory is None:
        return []
    try:
        names = os.listdir(directory)  # noqa: PTH208 - Path.glob keeps quiet about directories that cannot be read
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot look into {directory}: {error.strerror}") from error
    except OSError:
        return []
    return sorted(directory / name for name in names if name[0] != "." and fnmatchcase(name, pattern))


def _is_there(path: Path) -> bool:
    return os.path.lexists(path)


def _is_mask(path: Path) -> bool:
    """Return whether a file of this name is kept from running: it is empty, or a link to ``/dev/null``."""
    with suppress(OSError, RuntimeError):
        if path.is_symlink() and path.resolve() == MASK:
            return True
        found = path.stat()
        return stat.S_ISREG(found.st_mode) and found.st_size == 0
    return False


def _leads_nowhere(path: Path) -> bool:
    """Return whether it is a link to a file that has gone, as after another installation."""
    return os.path.islink(path) and not os.path.exists(path)  # noqa: PTH110, PTH114 - Path's may raise


def _shown(path: Path) -> str:
    return f"{path} -> {path.readlink()}" if path.is_symlink() else str(path)


def _change(link: Path, target: Path | None) -> None:
    """Make or replace a link, or remove it, in one step.

    Raises:
        PermissionDeniedError, CannotCreateError: It cannot be done.
    """
    what = f"cannot make the link {link}" if target else f"cannot remove {link}"
    try:
        if target is None:
            link.unlink()
            return
        link.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        draft = link.with_name(f".{link.name}.new")
        with suppress(FileNotFoundError):
            draft.unlink()
        draft.symlink_to(target)
        draft.replace(link)
    except PermissionError as error:
        raise PermissionDeniedError(f"{what}: {error.strerror}") from error
    except OSError as error:
        raise CannotCreateError(f"{what}: {error.strerror or error}") from error
