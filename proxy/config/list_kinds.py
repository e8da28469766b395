"""Kinds of settings that are lists or keys with values, under kubelet's names.

See kubernetes v1.36 staging/src/k8s.io/kubelet/config/v1beta1/types.go, KubeletConfiguration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from proxy.config.frozen_mapping import FrozenMapping
from proxy.config.kinds import AMOUNT, SettingKind, read_amount, text_schema, whole_number
from proxy.config.nested_values import YamlNode, suggestion
from proxy.model.devices import is_extended_resource
from proxy.model.errors import ConfigError
from proxy.model.options import (
    KUBELET_MAX_NODES,
    CpuOptions,
    TopologyOptions,
    parse_cpu_options,
    parse_topology_options,
)
from proxy.model.quantity import parse_quantity, show_quantity

_MAP = frozenset({"map"})
_LIST = frozenset({"seq"})
_AMOUNT_TAGS = frozenset({"str", "int", "float"})
_NODE = whole_number(0, 1023)
_HUGE = "hugepages-"
EVICTION_DEFAULT = 100 << 20
"""Bytes of kubelet's ``memory.available`` if ``evictionHard`` is not set."""
_SIGNALS = (
    "memory.available",
    "nodefs.available",
    "nodefs.inodesFree",
    "imagefs.available",
    "imagefs.inodesFree",
    "containerfs.available",
    "containerfs.inodesFree",
    "pid.available",
)

_RESOURCES_LIMIT = 128

Reserved = FrozenMapping[int, FrozenMapping[str, int]]
"""NUMA node to resource to bytes."""


def _options(
    parse: Callable[[Mapping[str, object]], Any],
    schemas: Mapping[str, Mapping[str, Any]],
    shown: Callable[[Any], dict[str, str]],
) -> SettingKind:
    """Return the kind of a policy's options: texts by name, which ``parse`` reads; each has a JSON Schema."""
    known = tuple(schemas)

    def read(tree: YamlNode) -> Any:
        raw: dict[str, object] = {}
        for name, value in tree.entries():
            if name not in known:
                hint = suggestion(name, known) or f" (known: {', '.join(known)})"
                raise value.fault(f"unknown option{hint}")
            raw[name] = value.text("a text, a number, or true or false")
            _parsed(parse, {name: raw[name]}, value, name)
        return _parsed(parse, raw, tree)

    schema = {"type": "object", "properties": schemas, "additionalProperties": False}
    wants = f"options with values: {', '.join(known)}"
    return SettingKind(wants, read, shown, _MAP, shows_wants=True, schema=schema)


def _parsed(
    parse: Callable[[Mapping[str, object]], Any], raw: Mapping[str, object], tree: YamlNode, name: str = ""
) -> Any:
    try:
        return parse(raw)
    except ConfigError as error:
        raise tree.fault(str(error).partition(": ")[2].removeprefix(f"{name} ")) from error


def _show_cpu(options: CpuOptions) -> dict[str, str]:
    return {name: "true" for name, on in options.as_kubelet().items() if on}


def _show_topology(options: TopologyOptions) -> dict[str, str]:
    set_here = {
        "prefer-closest-numa-nodes": "true" if options.prefer_closest_numa_nodes else "",
        "max-allowable-numa-nodes": str(options.max_allowable_numa_nodes or ""),
    }
    return {name: text for name, text in set_here.items() if text}


_GO_BOOL = {"enum": [True, False, 0, 1, *"01tTfF", "true", "TRUE", "True", "false", "FALSE", "False"]}
_GO_INT = {"anyOf": [{"type": "integer", "minimum": KUBELET_MAX_NODES}, text_schema(r"\+?[0-9]+")]}
CPU_OPTIONS = _options(parse_cpu_options, dict.fromkeys(CpuOptions().as_kubelet(), _GO_BOOL), _show_cpu)
TOPOLOGY_OPTIONS = _options(
    parse_topology_options,
    dict(zip(TopologyOptions().as_kubelet(), (_GO_BOOL, _GO_INT), strict=True)),
    _show_topology,
)


def _read_reserved(tree: YamlNode) -> Reserved:
    nodes: dict[int, dict[str, int]] = {}
    for entry in tree.members("a list of NUMA nodes with limits"):
        node, limits = _read_entry(entry)
        amounts = nodes.setdefault(node, {})
        for name, value in limits:
            _check_resource(name, value)
            if name in amounts:
                raise value.fault(f"NUMA node {node} keeps {name} already, in an entry before this one")
            try:
                amounts[name] = read_amount(value.text("an amount such as 1Gi", _AMOUNT_TAGS))
            except ValueError as error:
                raise value.fault(error) from error
            if not amounts[name]:
                raise value.fault("must be more than 0 (leave the resource out to keep none)")
    return FrozenMapping({node: FrozenMapping(amounts) for node, amounts in sorted(nodes.items())})


def _read_entry(entry: YamlNode) -> tuple[int, list[tuple[str, YamlNode]]]:
    node, limits = None, None
    for name, value in entry.entries("numaNode and limits"):
        if name == "numaNode":
            try:
                node = _NODE.read(value.text(_NODE.wants, _NODE.tags))
            except ValueError as error:
                raise value.fault(error) from error
        elif name == "limits":
            limits = list(value.entries("resources with amounts"))
        else:
            raise value.fault(f"unknown key{suggestion(name, ('numaNode', 'limits'))}")
    if node is None or not limits:
        raise entry.fault(f"{'numaNode' if node is None else 'limits'} is missing")
    return node, limits


def _check_resource(name: str, value: YamlNode) -> None:
    if name == "memory":
        return
    try:
        size = parse_quantity(name.removeprefix(_HUGE)) if name.startswith(_HUGE) else 0
    except ValueError:
        size = 0
    if size <= 0:
        raise value.fault("cannot be reserved, only memory and huge pages such as hugepages-1Gi can")
    if name != (right := f"{_HUGE}{show_quantity(size)}"):
        raise value.fault(f"pages of that size are called {right}")


def _show_reserved(reserved: Reserved) -> list[dict[str, object]]:
    return [
        {"numaNode": node, "limits": {name: show_quantity(size) for name, size in amounts.items()}}
        for node, amounts in reserved.items()
    ]


RESERVED_MEMORY = SettingKind(
    "a list of NUMA nodes with limits",
    _read_reserved,
    _show_reserved,
    _LIST,
    schema={
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "numaNode": _NODE.schema,
                "limits": {
                    "type": "object",
                    "minProperties": 1,
                    "propertyNames": {"pattern": "^(memory|hugepages-.+)$"},
                    "additionalProperties": AMOUNT,
                },
            },
            "required": ["numaNode", "limits"],
            "additionalProperties": False,
        },
    },
)


def _read_eviction(tree: YamlNode) -> int | None:
    amount = None
    for name, value in tree.entries():
        if name not in _SIGNALS:
            raise value.fault(f"unknown signal{suggestion(name, _SIGNALS)}")
        text = value.text("an amount such as 100Mi", _AMOUNT_TAGS)
        if name != _SIGNALS[0]:
            continue
        if text.endswith("%"):
            raise value.fault(f"{text!r} is a share: write the amount that it is on this machine")
        try:
            amount = read_amount(text)
        except ValueError as error:
            raise value.fault(error) from error
    return amount


def _show_eviction(amount: int | None) -> dict[str, str]:
    return {} if amount is None else {_SIGNALS[0]: show_quantity(amount)}


EVICTION = SettingKind(
    "signals with amounts",
    _read_eviction,
    _show_eviction,
    _MAP,
    schema={
        "type": "object",
        "properties": {
            _SIGNALS[0]: AMOUNT,
            **{signal: {"type": ["string", "number"]} for signal in _SIGNALS[1:]},
        },
        "additionalProperties": False,
    },
)


def _read_resources(tree: YamlNode) -> tuple[str, ...]:
    resources: dict[str, None] = {}
    for entry in tree.members("a list of extended resources"):
        name = entry.text("the name of a resource such as example.com/nic", _AMOUNT_TAGS)
        if not is_extended_resource(name):
            raise entry.fault(f"{name[:80]!r} is not the name of an extended resource")
        resources[name] = None
        if len(resources) > _RESOURCES_LIMIT:
            raise entry.fault(f"there are more than {_RESOURCES_LIMIT} resources")
    return tuple(resources)


RESOURCES = SettingKind(
    "a list of extended resources such as example.com/nic",
    _read_resources,
    list,
    _LIST,
    shows_wants=True,
    schema={"type": "array", "items": {"type": "string", "pattern": "^[^/]+/[^/]+$"}},
)
