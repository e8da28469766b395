"""The hook files that come with topoproxy: where they are, and which."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

import proxy.hooks
from proxy.model.errors import UsageError

TEMPLATE = "00-template"


def shipped_directory() -> Path:
    """Return the directory: in the package where it is installed, beside it in a clone."""
    package = Path(proxy.hooks.__file__).parent
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parents[1] / "hooks"


def shipped() -> dict[str, Path]:
    """Return all of them by name, without the template."""
    files = sorted(shipped_directory().glob("[0-9][0-9]-*.py"))
    return {path.stem: path for path in files if path.stem != TEMPLATE}


def template(name: str = TEMPLATE) -> Path:
    """Return a file that a new one can be made from.

    Raises:
        UsageError: None of them has this name.
    """
    known = shipped() | {TEMPLATE: shipped_directory() / f"{TEMPLATE}.py"}
    return known[full_name(name, known, "use")]


def full_name(name: str, known: Iterable[str], what: str) -> str:
    """Find the name that is meant: with ``.py``, or without its number, it is still clear.

    Args:
        name: What was typed.
        known: All names that there are.
        what: What is to be done, for the error.

    Raises:
        UsageError: There is no such name, or more than one.
    """
    names = sorted(known)
    wanted = name.removesuffix(".py")
    found = [wanted] if wanted in names else [each for each in names if each.partition("-")[2] == wanted]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"cannot {what} {name}: it may be {' or '.join(found)}")
    close = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    meant = f"; did you mean {close[0]}?" if close else "; topoproxy hooks list --all names all"
    raise UsageError(f"cannot {what} {name}: there is no such hook{meant}")
