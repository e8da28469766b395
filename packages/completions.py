"""Completions for shells, made by click: they query the installed command, so they always match it."""

from __future__ import annotations

from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from proxy.cli.main import cli

VARIABLE = "_TOPOPROXY_COMPLETE"


def scripts() -> dict[str, str]:
    """Return the script of each shell."""
    kinds: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
    # The base class's method: the method for bash would ask this machine's bash for its version.
    return {
        name: ShellComplete.source(kind(cli, {}, "topoproxy", VARIABLE)).strip() + "\n"
        for name, kind in kinds.items()
    }
