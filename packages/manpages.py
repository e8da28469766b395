"""Manual pages of all commands, from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from proxy import __version__
from proxy.cli.exit_codes import EXIT_CODES, codes_of
from proxy.cli.main import cli
from proxy.config import Config
from proxy.config.show import as_yaml

SECTION = 8


def commands(
    command: click.Command = cli, words: tuple[str, ...] = ("topoproxy",)
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Iterate over all commands with the words that call them."""
    yield words, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            part = command.get_command(context, name)
            assert part is not None
            yield from commands(part, (*words, name))


def pages(date: str) -> dict[str, str]:
    """Return all pages by file name.

    Args:
        date: The day of the release.
    """
    found = {f"{'-'.join(words)}.{SECTION}": page(words, command, date) for words, command in commands()}
    found["topoproxy.yaml.5"] = configuration(date)
    return found


def page(words: tuple[str, ...], command: click.Command, date: str) -> str:
    """Return the page of a command."""
    name = "-".join(words)
    context = click.Context(command, info_name=" ".join(words))
    first, *rest = (command.help or "").split("\n\n")
    summary = " ".join(first.split()).rstrip(".")
    lines = [
        *_head(name.upper(), SECTION, date),
        ".SH NAME",
        f"{_text(name)} \\- {_text(summary)}",
        ".SH SYNOPSIS",
        f".B {_text(' '.join(words))}",
        _text(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        *_paragraphs([first, *rest]),
    ]
    options = [part.get_help_record(context) for part in command.get_params(context)]
    if any(options):
        lines.append(".SH OPTIONS")
        for record in filter(None, options):
            lines += [".TP", f".B {_text(record[0])}", _text(record[1])]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for part in command.list_commands(context):
            lines += [
                ".TP",
                f".BR {_text('-'.join((*words, part)))} ({SECTION})",
                _summary(command, context, part),
            ]
    lines.append(".SH EXIT STATUS")
    known = codes_of(" ".join(words[1:]))
    for each in EXIT_CODES:
        if each.code in known:
            lines += [".TP", f".B {each.code}", _text(each.meaning)]
    parent = [f".BR {'-'.join(words[:-1])} ({SECTION})"] if len(words) > 1 else [".BR topoproxy.yaml (5)"]
    return "\n".join([*lines, ".SH SEE ALSO", *parent]) + "\n"


def configuration(date: str) -> str:
    """Return the page of the configuration file: all keys with their defaults."""
    text = as_yaml(Config())
    lines = ["\\&" + _text(line) for line in text.splitlines()]
    head = _head("TOPOPROXY.YAML", 5, date)
    name = [".SH NAME", "topoproxy.yaml \\- the configuration of topoproxy, /etc/topoproxy/config.yaml"]
    about = [".SH DESCRIPTION", "All keys with their defaults; a key that is left out has its default."]
    after = [".SH SEE ALSO", ".BR topoproxy\\-check\\-config (8)"]
    return "\n".join([*head, *name, *about, ".PP", ".nf", *lines, ".fi", *after]) + "\n"


def _head(name: str, section: int, date: str) -> list[str]:
    return [f'.TH "{_text(name)}" "{section}" "{date}" "topoproxy {__version__}" "topoproxy"', ".nh", ".ad l"]


def _summary(group: click.Group, context: click.Context, name: str) -> str:
    part = group.get_command(context, name)
    assert part is not None
    return _text(part.get_short_help_str(200))


def _paragraphs(texts: list[str]) -> Iterator[str]:
    for text in texts:
        lines = text.splitlines()
        if lines and lines[0].strip() == "\b":
            yield from (".PP", ".nf", *(_text(line) for line in lines[1:]), ".fi")
        elif text.strip():
            yield from (".PP", _text(" ".join(text.split())))


def _text(text: str) -> str:
    """Escape what roff would read as a request."""
    text = re.sub(r"\\", r"\\e", text).replace("-", "\\-").replace("'", "\\(aq")
    return f"\\&{text}" if text.startswith(".") else text
