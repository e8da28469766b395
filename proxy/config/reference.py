"""Generates ``docs/configuration.md`` and the JSON Schema of the file from the dataclasses that read it.

``python -m proxy.config.reference`` prints the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from proxy.config.former_keys import FORMER_KEYS
from proxy.config.schema import API_VERSION, KIND, Config
from proxy.config.setting import Setting, keys

HEAD = """\
# Configuration

`topoproxy serve` reads `/etc/topoproxy/config.yaml`, or the file that `--config` names. All keys are
optional. This page is generated from `proxy/config` by `make configuration`.

    topoproxy check-config --defaults      # a file with all keys, their defaults and explanations
    topoproxy check-config                 # whether it is valid, and what is in effect
    topoproxy check-config --schema        # its JSON Schema, for editors and for CI
    topoproxy reload                       # make the running daemon reread it

The file, its drop-ins and the directories that they are in must belong to root (or to the user of the
daemon), and no other user may write them; otherwise the daemon refuses them.

## Drop-ins

Files `*.yaml` of the directory `config.d` next to the file are merged over it in the order of their names:

- Sections, and other keys with values such as `hooks.settings`, are merged key by key, at any depth.
- Words, numbers and lists are replaced as a whole.
- A drop-in cannot remove an entry, only set it to another value.

Hidden files and files with other suffixes are ignored. Each file must be valid by itself, also in what a
later one replaces. Faults are reported with file and line, such as `config.d/50-pools.yaml, line 3`.
Options of `topoproxy serve` take precedence over all files.

## Reload

`topoproxy reload`, `systemctl reload topoproxy` and SIGHUP make the daemon read the file and its drop-ins
again, in another process, so that no call waits. Then

- a configuration that is refused changes nothing. The reason is in the answer, in the log, among the
  problems of `topoproxy status` until a later reload succeeds, and counted in
  `topoproxy_config_reloads_total{result}`. As long as the file is invalid, commands cannot read the admin
  socket's path from it: use `topoproxy status --admin unix:///run/topoproxy/admin.sock`;
- what can change takes effect, all keys together or none. Containers move only if their CPUs change.
  Owners keep their CPUs, also those that are reserved from now on. A change that would leave the shared
  pool empty is refused, and so is `beSuppress.mode` if nothing counts CPU time or, for `cfs-quota`, the
  cpu controller is missing;
- what needs a restart keeps its value until then and is named, in the answer, in the log and in `topoproxy
  status`. If what changes would contradict what stays, the reload is refused as a whole;
- options of `topoproxy serve` still take precedence over the files.

`topoproxy reload` ends with 69 if the daemon does not answer within `--timeout` seconds. No file is changed
then. A daemon that does not run reads the files when it starts. A reload that has begun continues: `topoproxy
status` shows what is in effect, and another `topoproxy reload` waits for the first one and reads the files
again. If files are restored to their previous content after 69, a reload, or a restart of the daemon,
must follow.

SIGHUP during a start or a reload causes one more reload afterwards. Nothing about a reload is stored: a
restart reads the files. So check a file before it is put in place (`topoproxy check-config --config FILE`):
a daemon that restarts with a bad one does not start (exit code 78).

## Keys

*Changes* says when a new value takes effect: at a reload, or at a restart. The QoS classes are
Koordinator's: LSE (latency-sensitive exclusive), LSR (latency-sensitive reserved), LS (latency-sensitive), BE
(best effort) and SYSTEM ([koordinator.md](koordinator.md)).
"""


def reference() -> str:
    """Return the page."""
    lines: list[str] = []
    whole = Config()
    lines += _table(whole, "")
    for item, key, setting in keys(whole):
        if setting is None:
            lines += [
                "",
                f"### {key}",
                "",
                item.metadata["doc"],
                "",
                *_table(getattr(whole, item.name), f"{key}."),
            ]
    return HEAD + "\n" + "\n".join(lines) + "\n"


def _table(part: Any, prefix: str) -> Iterator[str]:
    yield "| key | value | default | changes | explanation |"
    yield "|---|---|---|---|---|"
    for item, key, setting in keys(part):
        if setting is not None:
            cells = (f"`{prefix}{key}`", setting.kind.wants, _default(setting, getattr(part, item.name)))
            yield _row((*cells, _changes(setting), setting.doc))


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _changes(setting: Setting) -> str:
    if setting.live and not setting.restart_for:
        return "reload"
    return "restart" if not setting.live else change_text(setting)


def _default(setting: Setting, value: object) -> str:
    shown = setting.kind.show(value)
    if isinstance(shown, list):
        shown = ", ".join(map(str, shown))
    return f"`{shown}`" if shown else "empty"


_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def configuration_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a configuration file and of a drop-in.

    It describes single values. It does not describe the other checks of check-config: ranges of durations,
    settings that contradict each other, and the machine.
    """
    header = {
        "apiVersion": {"description": "The version of this form.", "const": API_VERSION},
        "kind": {"description": "The kind of the file.", "const": KIND},
    }
    whole = _section(Config())
    return {
        "$schema": _DIALECT,
        "$id": f"urn:topoproxy:configuration:{API_VERSION.partition('/')[2]}",
        "title": "The configuration of topoproxy",
        "type": ["object", "null"],
        "properties": {**header, **whole["properties"]},
        "additionalProperties": False,
    }


def _section(part: Any, name: str = "") -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for item, key, setting in keys(part):
        value = getattr(part, item.name)
        if setting is None:
            properties[key] = {"description": item.metadata["doc"], **_section(value, key)}
        else:
            properties[key] = _key(setting, value)
    for former, now in FORMER_KEYS.get(name, {}).items():
        described = f"The former name of {now}, which is read for one release."
        properties[former] = {**properties[now], "description": described, "deprecated": True}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _key(setting: Setting, default: object) -> dict[str, Any]:
    shown = setting.kind.show(default)
    if "str" not in setting.kind.tags and not setting.kind.nested:
        shown = default
    return {
        "description": f"{setting.doc} {change_text(setting)}",
        **setting.kind.schema,
        "default": shown,
        "x-live": setting.live,
    }


def change_text(setting: Setting) -> str:
    """Return when a new value takes effect, as a sentence."""
    if not setting.live:
        return "Needs a restart."
    if setting.restart_for:
        message = " or ".join(sorted(setting.kind.show(value) for value in setting.restart_for))
        return f"Takes effect at a reload; from and to {message} it needs a restart."
    return "Takes effect at a reload."


if __name__ == "__main__":
    sys.stdout.write(reference())
