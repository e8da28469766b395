"""The rules of a node follow from the configuration."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.config.load import parse
from proxy.config.schema import Config
from proxy.config.setting import Setting, keys
from proxy.engine.node import Node
from proxy.executor.rules_from_config import node_rules
from proxy.model.idset import CpuSet
from proxy.model.options import CpuOptions
from proxy.topology.regular_machine import regular_machine

MACHINE = regular_machine(2, 1, 4, 2)
DEFAULTS = parse("", "test")
OTHERS = {bool: False, CpuSet: CpuSet((2, 10)), CpuOptions: CpuOptions(full_pcpus_only=True)}


def settings(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Setting]]:
    """Yield the settings that are rules, and the fields that lead to them."""
    for item, _, setting in keys(config):
        if setting is None:
            yield from settings(getattr(config, item.name), (*path, item.name))
        elif setting.rule:
            yield (*path, item.name), setting


RULES = dict(settings(DEFAULTS))


def changed(config: Any, path: tuple[str, ...], value: object) -> Any:
    """Return a configuration with another value."""
    inner = changed(getattr(config, path[0]), path[1:], value) if path[1:] else value
    return dataclasses.replace(config, **{path[0]: inner})


@pytest.mark.parametrize("path", RULES, ids=".".join)
def test_a_setting_that_is_a_rule_reaches_the_node(path: tuple[str, ...]) -> None:
    before: Any = DEFAULTS
    for name in path:
        before = getattr(before, name)
    rule, options = RULES[path].rule, [OTHERS.get(type(before))]
    assert getattr(node_rules(DEFAULTS, MACHINE), rule) == before
    if isinstance(before, enum.Enum):
        options = list(type(before))
    value = next(option for option in options if option not in (None, before))
    config: Config = changed(DEFAULTS, path, value)
    assert getattr(node_rules(config, MACHINE), rule) == value


def test_a_node_without_a_configuration_has_the_default_rules() -> None:
    topology = node_rules(DEFAULTS, MACHINE).topology
    plain = Node(MACHINE, topology)
    for path, setting in RULES.items():
        assert getattr(plain, setting.rule) == getattr(node_rules(DEFAULTS, MACHINE), setting.rule), path


def test_amounts_are_turned_into_cpus_to_reserve() -> None:
    assert len(node_rules(parse("kubeReserved:\n  cpu: 1500m\n", "test"), MACHINE).reserved) == 2
