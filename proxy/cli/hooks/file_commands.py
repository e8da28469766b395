"""``topoproxy hooks enable``, ``disable``, ``new`` and ``registration``: write or link hook files."""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import click

import proxy.hooks
from proxy.atomic_write import write_file
from proxy.cli.settings import PATH, absolute_path, config_option, read_config
from proxy.model.errors import CannotCreateError, PermissionDeniedError, TopoproxyError, UsageError

if TYPE_CHECKING:
    from proxy.config.schema import HooksConfig

TEMPLATE = "00-template"


def shipped_directory() -> Path:
    """Return the directory of the shipped hooks: in an installed package, or next to it in a clone."""
    package = Path(proxy.hooks.__file__).parent
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parents[1] / "hooks"


def shipped() -> dict[str, Path]:
    """Return the files of all shipped hooks by name, without the template."""
    files = sorted(shipped_directory().glob("[0-9][0-9]-*.py"))
    return {path.stem: path for path in files if path.stem != TEMPLATE}


def template(name: str = TEMPLATE) -> Path:
    """Return the shipped hook file that a new one is made from.

    Raises:
        UsageError: None of them has this name.
    """
    known = shipped() | {TEMPLATE: shipped_directory() / f"{TEMPLATE}.py"}
    return known[full_name(name, known, "use")]


def full_name(name: str, known: Iterable[str], what: str) -> str:
    """Return the full name of a hook, which may be typed with ``.py`` or without its number.

    Args:
        name: What was typed.
        known: All existing names.
        what: The action, for the error.

    Raises:
        UsageError: There is no such name, or more than one.
    """
    names = sorted(known)
    wanted = name.removesuffix(".py")
    matches = (
        [wanted]
        if wanted in names
        else [known_name for known_name in names if known_name.partition("-")[2] == wanted]
    )
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(f"cannot {what} {name}: it may be {' or '.join(matches)}")
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    meant = f"; did you mean {close[0]}?" if close else "; topoproxy hooks list --all names all"
    raise UsageError(f"cannot {what} {name}: there is no such hook{meant}")


MASK = Path("/dev/null")
SOON = "a running daemon applies this within a second: topoproxy hooks list"


@click.command(short_help="Enable a hook.")
@click.argument("name")
@config_option
def enable(name: str, file: Path | None) -> None:
    """Enable a hook that comes with topoproxy, or that was disabled.

    NAME is as topoproxy hooks list --all shows it; its number may be left out. In hooks.directory a link to
    the file is created; a mask there (a link to /dev/null, an empty file) is removed.

    Ends with 1 if a directory has its name, 2 if there is no such hook, 73 if the link cannot be created, 77
    without permission.
    """
    hooks = read_config(file, {}).hooks
    name = full_name(
        name, {**_files(hooks.directory), **_files(hooks.vendor_directory), **shipped()}, "enable"
    )
    own, vendor = hooks.directory / f"{name}.py", hooks.vendor_directory / f"{name}.py"
    brought = _exists(vendor) and not _is_mask(vendor)
    masked = _is_mask(own) or _leads_nowhere(own)
    if not masked and _exists(own):
        if not os.path.isfile(own):  # noqa: PTH113 - Path.is_file raises without permission
            raise TopoproxyError(f"cannot enable {name}: {own} is not a file; remove it, or rename it")
        click.echo(f"{name} is enabled already: {_shown(own)}")
    elif not masked and brought:
        click.echo(f"{name} is enabled already: {_shown(vendor)}")
    elif brought:
        _set_link(own, None)
        click.echo(f"enabled {name}: {_shown(vendor)} is no longer masked\n{_next(hooks)}")
    elif name in shipped():
        _set_link(own, shipped()[name])
        click.echo(f"enabled {name}: {_shown(own)}\n{_next(hooks)}")
        _warn(own)
    elif _exists(own) and not _leads_nowhere(own):
        raise UsageError(f"cannot enable {name}: {own} masks a file that does not exist; remove it")
    elif not _exists(own):
        raise UsageError(f"cannot enable {name}: {vendor} is empty, and so disables it")
    else:
        raise UsageError(
            f"cannot enable {name}: {_shown(own)} points to nothing; remove it, or correct the link"
        )


@click.command()
@click.argument("name")
@config_option
def disable(name: str, file: Path | None) -> None:
    """Disable a hook.

    A link that topoproxy hooks enable has created is removed; a file in hooks.vendorDirectory is masked by a
    link to /dev/null of the same name in hooks.directory. A file of your own in hooks.directory is not
    touched.

    Ends with 1 if the hook is a file of your own or a server, 2 if there is no such hook, 73 if the link
    cannot be created, 77 without permission.
    """
    hooks = read_config(file, {}).hooks
    known = {**_files(hooks.directory), **_files(hooks.vendor_directory)}
    servers = {path.stem: path for path in _entries(hooks.server_directory, "*json")}
    name = full_name(name, {**shipped(), **known, **servers}, "disable")
    own, vendor = hooks.directory / f"{name}.py", hooks.vendor_directory / f"{name}.py"
    if name in servers and name not in known:
        raise TopoproxyError(f"cannot disable {name}: {servers[name]} names a server; remove that file")
    if _is_mask(own) or name not in known:
        click.echo(f"{name} is not enabled")
        return
    if own.exists() and not own.is_symlink():
        advice = f"rename it, for example to {own.name}.off"
        raise TopoproxyError(f"cannot disable {name}: {own} is a file of your own; {advice}")
    _set_link(own, MASK if _exists(vendor) else None)
    effect = f"{_shown(own)} masks {vendor}" if _exists(vendor) else f"the link {own} is removed"
    click.echo(f"disabled {name}: {effect}\n{_next(hooks)}")


def _next(hooks: HooksConfig) -> str:
    return SOON if hooks.enabled else "hooks.enabled is false in the configuration: no hook runs"


def _warn(link: Path) -> None:
    """Warn if the daemon will not run the enabled hook."""
    from proxy.hooks.loader.directories import candidate_of

    if reason := candidate_of(link).distrust:
        click.echo(f"note: the daemon will not run it: {reason}", err=True)


def _files(directory: Path) -> dict[str, Path]:
    """Return the hook files of a directory by name, including masks."""
    return {path.stem: path for path in _entries(directory, "*.py")}


def _entries(directory: Path | None, pattern: str) -> list[Path]:
    """Return the matching entries of a directory; none if it does not exist.

    Raises:
        PermissionDeniedError: The directory may not be read.
    """
    if directory is None:
        return []
    try:
        names = os.listdir(directory)  # noqa: PTH208 - Path.glob ignores unreadable directories
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot read the directory {directory}: {error.strerror}") from error
    except OSError:
        return []
    return sorted(directory / name for name in names if name[0] != "." and fnmatchcase(name, pattern))


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _is_mask(path: Path) -> bool:
    """Return whether the file is a mask: empty, or a link to ``/dev/null``."""
    with suppress(OSError, RuntimeError):
        if path.is_symlink() and path.resolve() == MASK:
            return True
        status = path.stat()
        return stat.S_ISREG(status.st_mode) and status.st_size == 0
    return False


def _leads_nowhere(path: Path) -> bool:
    """Return whether it is a link to a file that does not exist any more, as after another installation."""
    return os.path.islink(path) and not os.path.exists(path)  # noqa: PTH110, PTH114 - Path's may raise


def _shown(path: Path) -> str:
    return f"{path} -> {path.readlink()}" if path.is_symlink() else str(path)


def _set_link(link: Path, target: Path | None) -> None:
    """Make or replace a link, or remove it, in one step.

    Raises:
        PermissionDeniedError, CannotCreateError: The change is impossible.
    """
    what = f"cannot create the link {link}" if target else f"cannot remove {link}"
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
    "--directory",
    type=PATH,
    metavar="DIR",
    help="An existing directory for the file; hooks.directory of the configuration by default.",
)
@click.option("--folder", "former_option", type=PATH, hidden=True)  # the former name, for one release
@config_option
def new(
    name: str, source: str, directory: Path | None, former_option: Path | None, file: Path | None
) -> None:
    """Create a hook file from a template.

    NAME is two digits and a name, such as 50-mine: hooks are called in the order of their names. The new file
    is readable by all and writable by its owner alone, as the daemon requires; as root, in the directory of
    the configuration, a running daemon loads it at once.

    Ends with 2 for a name that cannot be used, 73 if the file exists already or cannot be created, 77 without
    permission.
    """
    name = name.removesuffix(".py")
    if not _NAME.fullmatch(name):
        hint = f"50-{name}" if _NAME.fullmatch(f"50-{name}") else "50-mine"
        form = 'NN-name (two digits, "-", then characters a-z, 0-9 and "-")'
        raise UsageError(f"cannot create hook {name}: a name is {form}, such as {hint}")
    file_of_source = template(source)
    # The file shows an example of its configuration, which has the hook's name as a key.
    text = file_of_source.read_text().replace(f"{file_of_source.stem}:", f"{name}:").encode()
    place, create_directory = directory or former_option, False
    if place is None or not os.path.lexists(place):
        configured = read_config(file, {}).hooks.directory
        create_directory = (
            place is None or Path(absolute_path("--directory", str(place))) == configured.absolute()
        )
        place = place or configured
    path = place / f"{name}.py"
    make_file(path, text, create_directory=create_directory)
    lines = [f"created {path}; next:"]
    lines += [f"  {step}" for step in _next_steps(path)]
    click.echo("\n".join(lines))


def _next_steps(path: Path) -> list[str]:
    return [
        "topoproxy hooks points                 what it can receive, and answer",
        f"topoproxy hooks validate {path}",
        f"topoproxy hooks run {path} --example pre_create_container",
        "topoproxy hooks list                   on a node: does it run?",
    ]


def make_file(path: Path, text: bytes, *, create_directory: bool) -> None:
    """Create a file with mode 0644; it appears complete, or not at all.

    Args:
        path: The path of the file.
        text: Its content.
        create_directory: Create its directory too, if it does not exist.

    Raises:
        CannotCreateError: The file exists already, or cannot be created.
        PermissionDeniedError: The process may not create it.
    """
    if os.path.lexists(path.parent) and not os.path.isdir(path.parent):  # noqa: PTH112 - Path's may raise
        raise CannotCreateError(f"cannot create {path}: {path.parent} is not a directory")
    try:
        if create_directory:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_file(path, text, mode=0o644, overwrite=False)
    except FileExistsError as error:
        raise CannotCreateError(f"cannot create {path}: it exists already") from error
    except FileNotFoundError as error:
        raise CannotCreateError(f"cannot create {path}: no such directory") from error
    except PermissionError as error:
        raise PermissionDeniedError(f"cannot create {path}: {error.strerror}") from error
    except OSError as error:
        raise CannotCreateError(f"cannot create {path}: {error.strerror or error}") from error


@click.command(short_help="Print the file that registers topoproxy at koord-runtime-proxy.")
@config_option
def registration(file: Path | None) -> None:
    """Print the file that registers topoproxy as a hook server of koord-runtime-proxy.

    For nodes on which that proxy stays between kubelet and the runtime, and topoproxy decides on CPUs. Set
    hooks.serve in the configuration to the path of a socket, start topoproxy, and then:

    \b
      topoproxy hooks registration > /etc/runtime/hookserver.d/topoproxy.json

    Ends with 78 if hooks.serve is not set.
    """  # noqa: D301 - click wants the real backspace
    from proxy.frontends.hookserver.registration import registration as text

    click.echo(text(read_config(file, {})), nl=False)
