"""Settings that come from the cluster: which ones the node's operator permits, and how they are merged.

The cluster agent writes the settings of the selected ``TopoproxyConfig`` to a file next to its facts. They
are merged over the node's own file and its drop-ins, and read by the same rules. The node's own file lists
the keys that they may have; none by default. If any of them is invalid, all are ignored, and that is
reported: nothing from the cluster can prevent the node from starting, or from following its operator's
changes.

Only keys that a reload changes can be permitted: no paths, sockets or credentials. Hooks cannot be permitted
either, because they are programs, nor can the keys that limit the influence of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.config.kinds import OPTIONAL_FILE, SettingKind
from proxy.config.nested_values import YamlNode, suggestion
from proxy.config.setting import Setting, key, keys

if TYPE_CHECKING:
    import yaml


FILE_NAME = "config.yaml"
IGNORED = "the settings from the cluster are ignored"
_NEVER = ("hooks", "clusterConfig")
_MOST = 200
_HEADER = frozenset({"apiVersion", "kind"})


def _read_keys(tree: YamlNode) -> tuple[str, ...]:
    keys: dict[str, None] = {}
    for entry in tree.members("a list of keys"):
        name = entry.text("a key such as admission.maxCPUsPerPod", frozenset({"str"}))
        if not name or len(name) > 100:
            raise entry.fault(f"{name[:100]!r} is not a key")
        keys[name] = None
        if len(keys) > _MOST:
            raise entry.fault(f"there are more than {_MOST} keys")
    return tuple(keys)


KEYS = SettingKind(
    "a list of keys and sections",
    _read_keys,
    list,
    frozenset({"seq"}),
    schema={
        "type": "array",
        "maxItems": _MOST,
        "items": {"type": "string", "minLength": 1, "maxLength": 100},
    },
)


@dataclass(frozen=True, slots=True)
class ClusterConfigConfig:
    """The keys that the cluster may set on this node."""

    allowed: tuple[str, ...] = field(
        default=(),
        metadata=key(
            "allowed",
            KEYS,
            "Keys and sections, such as admission or log.level, that a TopoproxyConfig of the cluster may "
            "set on this node; needs clusterFacts.directory. Of a section, only keys that a reload can "
            "change.",
            live=True,
        ),
    )


def is_permitted(name: str, setting: Setting, allowed: tuple[str, ...]) -> bool:
    """Return whether the cluster may set a key.

    Args:
        name: The key with its section.
        setting: Its declaration.
        allowed: The keys that the operator permits.
    """
    section = name.partition(".")[0]
    return setting.live and section not in _NEVER and (name in allowed or section in allowed)


def allowed_key_faults(allowed: tuple[str, ...], config: Any) -> Iterator[str]:
    """Yield the faults in the list of permitted keys.

    Args:
        allowed: The keys that the operator permits.
        config: A configuration, for its keys.
    """
    settings = dict(_settings(config, ""))
    sections = {name.partition(".")[0] for name in settings if "." in name}
    for name in allowed:
        if name.partition(".")[0] in _NEVER:
            yield f"clusterConfig.allowed: {name} is never set by the cluster"
        elif name not in settings and name not in sections:
            yield f"clusterConfig.allowed: {name} is not a key{suggestion(name, [*settings, *sections])}"
        elif name in settings and not settings[name].live:
            yield f"clusterConfig.allowed: {name} needs a restart, so the cluster cannot set it"


def _settings(part: Any, prefix: str) -> Iterator[tuple[str, Setting]]:
    for item, name, setting in keys(part):
        if setting is None:
            yield from _settings(getattr(part, item.name), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", setting


def forbidden(root: yaml.Node, allowed: tuple[str, ...], config: Any) -> Iterator[tuple[yaml.Node, str]]:
    """Yield the keys of a file that the cluster may not set: the node of the key, and its name."""
    import yaml

    if not isinstance(root, yaml.MappingNode):
        return
    settings = dict(_settings(config, ""))
    for key_node, value in root.value:
        name = str(key_node.value)
        if name in _HEADER:
            continue
        inner = [(key_node, name)]
        if isinstance(value, yaml.MappingNode) and name not in settings:
            inner = [(node, f"{name}.{node.value}") for node, _ in value.value]
        for node, full in inner:
            if full not in settings or not is_permitted(full, settings[full], allowed):
                yield node, full


def cluster_config_file(directory: Path | None, allowed: tuple[str, ...]) -> Path | None:
    """Return the file with the settings of the cluster; None if the node permits none."""
    return directory / FILE_NAME if directory is not None and allowed else None


@dataclass(frozen=True, slots=True)
class ClusterFactsConfig:
    """The facts that the cluster agent writes for the daemon.

    Attributes:
        directory: The directory of the facts; None if none are read.
    """

    directory: Path | None = field(
        default=None,
        metadata=key(
            "directory",
            OPTIONAL_FILE,
            "The directory, such as /var/lib/topoproxy/cluster, in which topoproxy agent writes the Node "
            "object, the labels of namespaces and this node's pods for the daemon. Empty: nothing is "
            "written or read.",
        ),
    )
