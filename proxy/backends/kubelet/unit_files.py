"""Read the command line that systemd gives to kubelet from its unit, drop-ins and environment files.

If several unit files have the same name, the file in the first directory is used; if that file is empty or a
link to ``/dev/null``, the unit is masked and does not start (systemd.unit(5), systemd.exec(5)). The drop-ins
of all directories are read in the order of their names. ``ExecStart=``, ``Environment=`` and
``EnvironmentFile=`` add to the earlier values, and an empty value clears them. Variables of environment files
override those of ``Environment=``, and a later file overrides an earlier one. If a flag is given twice, pflag
uses the last value. kubelet treats ``_`` in a flag's name as ``-`` (k8s.io/component-base v0.36
cli/flag/flags.go, WordSepNormalizeFunc).
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from proxy.backends.kubelet.small_file import read_small_file

UNIT_DIRECTORIES = (
    "etc/systemd/system",
    "run/systemd/system",
    "usr/local/lib/systemd/system",
    "usr/lib/systemd/system",
    "lib/systemd/system",
)
FILE_LIMIT_BYTES = 256 << 10
ENDPOINT_FLAG = re.compile(r"--container[-_]runtime[-_]endpoint(?:=|\s+)[\"']?([^\s\"'\\]+)")
_SETTING = re.compile(
    r"^[ \t]*(ExecStart|Environment|EnvironmentFile)[ \t]*=[ \t]*((?:.*\\\n)*.*)$", re.MULTILINE
)
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


class Span(Struct, frozen=True):
    """A part of a file.

    Attributes:
        path: The file.
        start, end: The position of the part in the file's text.
        text: The text of the part.
    """

    path: Path
    start: int
    end: int
    text: str

    def part(self, start: int, end: int) -> Span:
        """Return a part of this part."""
        return Span(self.path, self.start + start, self.start + end, self.text[start:end])


class UnitCommand(Struct, frozen=True):
    """The command that a unit starts.

    Attributes:
        exec_start: The command as written in the unit.
        variables: The position of the value of each variable.
    """

    exec_start: Span
    variables: dict[str, Span]

    def flags(self) -> dict[str, str]:
        """Return the flags by their names, without dashes."""
        text = _VARIABLE.sub(lambda m: self._value(m[1]), self.exec_start.text.replace("\\\n", " "))
        try:
            arguments = shlex.split(text)
        except ValueError:
            arguments = text.split()
        return dict(flags_of(arguments[1:]))

    def _value(self, name: str) -> str:
        return self.variables[name].text if name in self.variables else ""

    def endpoint(self) -> Span | None:
        """Return the position of the last ``--container-runtime-endpoint``'s value; None if there is none."""
        last = None
        for match in re.finditer(f"{ENDPOINT_FLAG.pattern}|{_VARIABLE.pattern}", self.exec_start.text):
            if match[1] is not None:
                value = self.exec_start.part(*match.span(1))
                name = _VARIABLE.fullmatch(value.text)
                last = self.variables.get(name[1], value) if name else value
            elif match[2] in self.variables:
                last = last_endpoint_flag(self.variables[match[2]]) or last
        return last


def last_endpoint_flag(span: Span) -> Span | None:
    """Return the position of the endpoint in a part of a command line; None if it names none."""
    endpoint = None
    for match in ENDPOINT_FLAG.finditer(span.text):
        endpoint = span.part(*match.span(1))
    return endpoint


def flags_of(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each ``--name=value`` and ``--name value``; the last of a name counts."""
    for argument, after in zip(arguments, [*arguments[1:], ""], strict=True):
        name, has_value, value = argument.partition("=")
        if name.startswith("--"):
            yield name[2:].replace("_", "-"), value if has_value else after


def read_span(path: Path) -> Span | None:
    """Read a whole file; None if that is not possible."""
    try:
        text = read_small_file(str(path), FILE_LIMIT_BYTES)[0].decode()
    except (OSError, ValueError):
        return None
    return Span(path, 0, len(text), text)


def unit_sources(root: Path, unit: str) -> list[Path]:
    """Return the file of a unit and its drop-ins in the order in which systemd reads them; none if masked."""
    main = next((path for place in UNIT_DIRECTORIES if os.path.lexists(path := root / place / unit)), None)
    if main is None or not _has_content(main):
        return []
    drop_ins: dict[str, Path] = {}
    for place in UNIT_DIRECTORIES:
        for path in (root / place / f"{unit}.d").glob("*.conf"):
            drop_ins.setdefault(path.name, path)
    return [main, *(drop_ins[name] for name in sorted(drop_ins))]


def _has_content(path: Path) -> bool:
    try:
        now = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(now.st_mode) and now.st_size > 0


def unit_command(root: Path, unit: str) -> UnitCommand | None:
    """Return the command that a unit starts; None if there is no unit or no command. Blocks on the disk.

    Args:
        root: Used in place of ``/``.
        unit: The unit's name.
    """
    settings: dict[str, list[Span]] = {"ExecStart": [], "Environment": [], "EnvironmentFile": []}
    for path in unit_sources(root, unit):
        whole = read_span(path)
        for match in _SETTING.finditer(whole.text if whole else ""):
            assert whole is not None
            if match[2].strip():
                settings[match[1]].append(whole.part(*match.span(2)))
            else:
                settings[match[1]].clear()
    if not settings["ExecStart"]:
        return None
    variables: dict[str, Span] = {}
    for span in settings["Environment"]:
        variables |= _assigned(span)
    for span in settings["EnvironmentFile"]:
        file = read_span(root / span.text.strip().lstrip("-").lstrip("/"))
        if file is not None:
            variables |= _env_file(file)
    return UnitCommand(settings["ExecStart"][-1], variables)


_ASSIGNED = re.compile(r"\"(\w+)=([^\"]*)\"|'(\w+)=([^']*)'|(?<!\S)(\w+)=(?:\"([^\"]*)\"|(\S*))")
_LINE = re.compile(r"^[ \t]*(?:export[ \t]+)?(\w+)=(?:\"([^\"]*)\"|'([^']*)'|(.*))[ \t]*$", re.MULTILINE)


def _assigned(span: Span) -> dict[str, Span]:
    """Return the variables in a value of ``Environment=``."""
    variables = {}
    for match in _ASSIGNED.finditer(span.text):
        name = match[1] or match[3] or match[5]
        group = next(number for number in (2, 4, 6, 7) if match[number] is not None)
        variables[name] = span.part(*match.span(group))
    return variables


def _env_file(file: Span) -> dict[str, Span]:
    variables = {}
    for match in _LINE.finditer(file.text):
        group = next(number for number in (2, 3, 4) if match[number] is not None)
        variables[match[1]] = file.part(*match.span(group))
    return variables
