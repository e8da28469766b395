"""The exit codes of all commands: the table of docs/exit-codes.md, and the last line of each ``--help``."""

from __future__ import annotations

from dataclasses import dataclass

ALL = ("all",)
_QUERY_COMMANDS = (
    "status",
    "report",
    "observe report",
    "explain",
    "takeover plan",
    "takeover status",
    "takeover start",
    "takeover finish",
    "takeover revert",
    "release",
    "reload",
    "enforce status",
    "enforce pause",
    "enforce resume",
)
_ATTACH_COMMANDS = ("attach", "detach")
_HOOK_FILE_COMMANDS = ("hooks new", "hooks enable", "hooks disable")
_CONFIGURATION_COMMANDS = (
    "serve",
    *_QUERY_COMMANDS,
    *_ATTACH_COMMANDS,
    *(f"hooks {name}" for name in ("list", "validate", "new", "run", "enable", "disable", "registration")),
    "devices",
    "simulate",
    "agent",
    "check-config",
)


@dataclass(frozen=True, slots=True)
class ExitCode:
    """An exit code.

    Attributes:
        code: The number; the names of 64 and more are those of sysexits.h.
        meaning: When a command ends with it.
        commands: The commands that can end with it.
    """

    code: int
    meaning: str
    commands: tuple[str, ...] = ALL


EXIT_CODES = (
    ExitCode(0, "Success, including when there was nothing to do"),
    ExitCode(
        1,
        "It cannot be done now, or a check failed: the message has the reason; or an internal error",
    ),
    ExitCode(2, "The command line is wrong"),
    ExitCode(
        65,
        "Invalid input: a machine (a description or a sysfs tree), a manifest, a hook, an event, a"
        " certificate; or the daemon refuses the request (EX_DATAERR)",
        (
            *_QUERY_COMMANDS,
            *_ATTACH_COMMANDS,
            "hooks run",
            "hooks validate",
            "topology",
            "devices",
            "simulate",
            "serve",
            "upgrade",
            "scheduler-extender",
        ),
    ),
    ExitCode(
        69,
        "The daemon does not answer; demo: the container runtime (EX_UNAVAILABLE)",
        (*_QUERY_COMMANDS, "upgrade", "demo"),
    ),
    ExitCode(
        73,
        "A socket, the state or a file cannot be created (EX_CANTCREAT)",
        (
            "serve",
            "release",
            *_ATTACH_COMMANDS,
            *_HOOK_FILE_COMMANDS,
            "bundle",
            "simulate",
            "scheduler-extender",
        ),
    ),
    ExitCode(74, "The output cannot be written: it is closed, or the disk is full (EX_IOERR)"),
    ExitCode(
        75,
        "Another topoproxy uses the socket or the state directory; scheduler-extender: the lease is lost, the"
        " process must be started again (EX_TEMPFAIL)",
        ("serve", "release", "scheduler-extender"),
    ),
    ExitCode(77, "No permission (EX_NOPERM)", (*_CONFIGURATION_COMMANDS, "topology", "upgrade", "demo")),
    ExitCode(
        78,
        "The configuration is invalid: the message names file and key, and the line where one value is wrong"
        " (EX_CONFIG)",
        (*_CONFIGURATION_COMMANDS, "upgrade"),
    ),
    ExitCode(
        129, "It was ended by a closed terminal (SIGHUP), and reported how far it was", _ATTACH_COMMANDS
    ),
    ExitCode(130, "It was interrupted (SIGINT)"),
    ExitCode(141, "The reader of the output closed the pipe (SIGPIPE)"),
    ExitCode(143, "It was ended (SIGTERM), and reported how far it was", _ATTACH_COMMANDS),
)
DOC_PAGE = "docs/exit-codes.md"
EPILOG = f"Exit codes of all commands: {DOC_PAGE}"


def codes_of(command: str) -> list[int]:
    """Return the exit codes of a command, such as ``takeover plan``."""
    return [each.code for each in EXIT_CODES if each.commands == ALL or command in each.commands]


def epilog(command: str) -> str:
    """Return the last line of a command's help."""
    return f"\b\nExit codes ({DOC_PAGE}): {', '.join(map(str, codes_of(command)))}"


def table() -> str:
    """Write the table of the page."""
    rows = ["| code | meaning | commands |", "|---|---|---|"]
    for each in EXIT_CODES:
        names = "all" if each.commands == ALL else ", ".join(f"`{name}`" for name in each.commands)
        rows.append(f"| {each.code} | {each.meaning} | {names} |")
    return "\n".join(rows) + "\n"
