"""The section of hooks: their directories, and the settings of each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from proxy.config.admission import NAMESPACES
from proxy.config.enums import FailurePolicy
from proxy.config.frozen_mapping import FrozenMapping
from proxy.config.kinds import (
    BOOLEAN,
    DIRECTORY,
    OPTIONAL_FILE,
    OPTIONAL_SOCKET,
    SettingKind,
    choice,
    duration,
    whole_number,
)
from proxy.config.nested_values import YamlNode, suggestion
from proxy.config.setting import key
from proxy.model.admission import Namespaces

TIMEOUT = duration(0.001, 100)
POLICY = choice(FailurePolicy)
_MOST = 1000
_USER = whole_number(0, 2**32 - 2)
_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?"
_PAIR = re.compile(f"{_WORD}=(?:{_WORD})?")


@dataclass(frozen=True, slots=True)
class HookSettings:
    """The settings of one hook.

    Attributes:
        timeout: Seconds for one answer; None if it is not set.
        policy: What happens to a call when the hook fails; None if it is not set.
        config: The hook's own keys, with plain values: strings, numbers, booleans, tuples and
            ``FrozenMapping``. None if it is not set.
    """

    timeout: float | None = None
    policy: FailurePolicy | None = None
    config: FrozenMapping[str, Any] | None = None


Settings: TypeAlias = FrozenMapping[str, HookSettings]
"""Name of a hook to its settings."""


def _read_settings(tree: YamlNode) -> Settings:
    hooks: dict[str, HookSettings] = {}
    for name, entry in tree.entries("names of hooks with keys"):
        if not name or "/" in name or name.endswith((".py", ".json")):
            raise entry.fault("a hook's name is that of its file, without directory and ending")
        if len(hooks) == _MOST:
            raise entry.fault(f"there are more than {_MOST} hooks")
        hooks[name] = _read_hook(entry)
    return FrozenMapping(hooks)


def _read_hook(entry: YamlNode) -> HookSettings:
    known_keys = ("timeout", "failurePolicy", "config")
    timeout, policy, config = None, None, None
    for name, value in entry.entries(f"the keys {', '.join(known_keys)}"):
        if name == "timeout":
            timeout = _read(TIMEOUT, value)
        elif name == "failurePolicy":
            policy = _read(POLICY, value)
        elif name == "config":
            next(value.entries(), None)
            config = value.plain()
        else:
            hint = suggestion(name, known_keys) or "; the hook's own keys belong below config"
            raise value.fault(f"unknown key{hint}")
    return HookSettings(timeout, policy, config)


def _read(kind: SettingKind, value: YamlNode) -> Any:
    try:
        return kind.read(value.text(kind.wants, kind.tags))
    except ValueError as error:
        raise value.fault(error) from error


def _show_settings(hooks: Settings) -> dict[str, object]:
    return {name: _show_hook(settings) for name, settings in hooks.items()}


def _show_hook(settings: HookSettings) -> dict[str, object]:
    shown: dict[str, object] = {}
    if settings.timeout is not None:
        shown["timeout"] = TIMEOUT.show(settings.timeout)
    if settings.policy is not None:
        shown["failurePolicy"] = str(settings.policy)
    if settings.config is not None:
        shown["config"] = _show_plain(settings.config)
    return shown


def _show_plain(value: Any) -> Any:
    if isinstance(value, FrozenMapping):
        return {name: _show_plain(inner) for name, inner in value.items()}
    return [_show_plain(inner) for inner in value] if isinstance(value, tuple) else value


def _read_users(tree: YamlNode) -> tuple[int, ...]:
    return tuple(sorted({_read(_USER, entry) for entry in tree.members("a list of numbers of users")}))


def _read_pair(text: str) -> str:
    if text.strip() and not _PAIR.fullmatch(text):
        raise ValueError(f"{text!r} is not a label such as example.com/key=value")
    return text.strip()


SETTINGS = SettingKind(
    "names of hooks with keys",
    _read_settings,
    _show_settings,
    frozenset({"map"}),
    schema={
        "type": "object",
        "maxProperties": _MOST,
        "propertyNames": {"pattern": "^[^/]+$", "not": {"pattern": r"\.(py|json)$"}},
        "additionalProperties": {
            "type": "object",
            "properties": {
                "timeout": TIMEOUT.schema,
                "failurePolicy": POLICY.schema,
                "config": {"type": "object"},
            },
            "additionalProperties": False,
        },
    },
)
USERS = SettingKind(
    "a list of numbers of users",
    _read_users,
    list,
    frozenset({"seq"}),
    schema={"type": "array", "items": _USER.schema},
)
LABEL = SettingKind(
    "a label such as example.com/key=value, or empty",
    _read_pair,
    str,
    schema={"type": "string", "pattern": rf"^(\s*|{_PAIR.pattern})$"},
)


@dataclass(frozen=True, slots=True)
class HooksConfig:
    """Plugins that are called while a CRI call is processed.

    Attributes:
        server_directory: The directory of server files; None if no remote servers are used.
        timeout: Seconds for one answer, if a hook's settings have none.
        policy: What happens to a call when a hook fails, unless the hook's settings say otherwise.
        skip_label: ``key=value``, or empty.
        skip_namespaces: The namespaces in which the label counts.
        serve: The socket for Koordinator's hook protocol; None if it is not served.
    """

    enabled: bool = field(default=True, metadata=key("enabled", BOOLEAN, "Load hooks and call them."))
    directory: Path = field(
        default=Path("/etc/topoproxy/hooks.d"),
        metadata=key(
            "directory",
            DIRECTORY,
            "The directory of hook files NN-name.py; takes precedence over vendorDirectory.",
            live=True,
        ),
    )
    vendor_directory: Path = field(
        default=Path("/usr/lib/topoproxy/hooks.d"),
        metadata=key(
            "vendorDirectory",
            DIRECTORY,
            "The directory in which packages install hook files; a file of the same name in directory "
            "replaces one.",
            live=True,
        ),
    )
    server_directory: Path | None = field(
        default=Path("/etc/runtime/hookserver.d"),
        metadata=key(
            "serverDirectory",
            OPTIONAL_FILE,
            "The directory of Koordinator's JSON files that name hook servers. Empty: no servers are called.",
            live=True,
        ),
    )
    server_users: tuple[int, ...] = field(
        default=(),
        metadata=key(
            "serverUsers",
            USERS,
            "Users (ids), besides root, whose processes may act as hook servers. The directories of the "
            "socket may also belong to them.",
            live=True,
        ),
    )
    timeout: float = field(
        default=0.5,
        metadata=key("timeout", TIMEOUT, "Longest time that a hook may take for one answer.", live=True),
    )
    policy: FailurePolicy = field(
        default=FailurePolicy.IGNORE,
        metadata=key(
            "failurePolicy",
            POLICY,
            "What happens when a hook fails. Ignore: its answer is left out. Fail: the call is refused. For "
            "a server, its JSON file decides.",
            live=True,
        ),
    )
    skip_label: str = field(
        default="runtimeproxy.koordinator.sh/skip-hookserver=true",
        metadata=key(
            "skipLabel",
            LABEL,
            "Servers are not called for pods with this label, which the pods of the servers themselves "
            "have. Empty: they are called for all pods.",
            live=True,
        ),
    )
    skip_namespaces: Namespaces = field(
        default=Namespaces(("kube-system", "koordinator-system")),
        metadata=key(
            "skipLabelNamespaces",
            NAMESPACES,
            "Namespaces in which skipLabel has an effect: a pod of another namespace cannot hide from a "
            "server.",
            live=True,
        ),
    )
    owned_cpus: bool = field(
        default=False,
        metadata=key(
            "ownedCPUs", BOOLEAN, "Hooks may let containers run on CPUs that another container owns."
        ),
    )
    serve: Path | None = field(
        default=None,
        metadata=key(
            "serve",
            OPTIONAL_SOCKET,
            "The socket at which Koordinator's runtime proxy can call topoproxy as a hook server. Empty: "
            "not served.",
        ),
    )
    settings: Settings = field(
        default=FrozenMapping(),
        metadata=key(
            "settings",
            SETTINGS,
            "Settings of single hooks, by name: {10-quota: {timeout: 1s, failurePolicy: Fail, config: "
            "{...}}}. The hook defines what config may contain.",
            live=True,
        ),
    )
