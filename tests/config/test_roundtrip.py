"""Any configuration, written as a file, reads back as itself."""

from __future__ import annotations

import enum
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.config import Config, as_yaml, parse
from proxy.config.frozen_mapping import FrozenMapping
from proxy.config.hooks import HookSettings
from proxy.config.kinds import OPTIONAL_ADDRESS
from proxy.config.schema import FailurePolicy, Setting, keys
from proxy.config.transfer import from_plain, to_plain
from proxy.model.admission import Namespaces
from proxy.model.errors import ConfigError
from proxy.model.idset import CpuSet
from proxy.model.label_selector import LabelExpression, LabelOperator, LabelSelector
from proxy.model.options import CpuOptions, TopologyOptions, parse_cpu_options
from proxy.reload.reread import changes, with_live_values

PATHS = st.lists(st.sampled_from(["a", "b c", "ä", "#", "~", "no", "1", "'\""]), min_size=1, max_size=4).map(
    lambda parts: Path("/", *parts)
)
AMOUNTS = st.none() | st.integers(0, 1 << 62) | st.integers(0, 1 << 20).map(lambda n: n << 30)
LABELS = st.sampled_from(["app", "no", "1", "example.com/tier", "a.b-c/D_e.f"])
LABEL_VALUES = st.sampled_from(["", "a", "on", "1", "1.5", "0x1f", "D_e.f-g"])
RESOURCES = st.sampled_from(["memory", "hugepages-2Mi", "hugepages-1Gi", "hugepages-64Ki"])
LIMITS = st.dictionaries(RESOURCES, st.integers(1, 1 << 62), min_size=1).map(FrozenMapping)


def possible(options: CpuOptions) -> bool:
    try:
        return parse_cpu_options(dict(options.as_kubelet())) == options
    except ConfigError:
        return False


PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.booleans()
    | st.integers(1 - 10**18, 10**18 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(["010", "1:30", "no", "~", "1e5", "0x1f", ".inf", "2026-01-01"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3).map(FrozenMapping)
    ),
    max_leaves=8,
)
SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "cpuManagerPolicyOptions": st.builds(CpuOptions, *[st.booleans()] * 6).filter(possible),
    "topologyManagerPolicyOptions": st.builds(
        TopologyOptions, st.booleans(), st.none() | st.integers(8, 10**6)
    ),
    **dict.fromkeys(
        ("reservedSystemCPUs", "reservedCPUs", "systemCPUs"), st.sets(st.integers(0, 300)).map(CpuSet)
    ),
    "reservedMemory": st.dictionaries(st.integers(0, 1023), LIMITS, max_size=4).map(FrozenMapping),
    "evictionHard": AMOUNTS,
    **dict.fromkeys(
        ("pods", "configz"),
        st.sampled_from(["", "https://127.0.0.1:10250", "http://[::1]:1"]).map(OPTIONAL_ADDRESS.read),
    ),
    "shim": st.sets(st.sampled_from(["a.com/x", "b/y", "c.d/z-1"])).map(lambda names: tuple(sorted(names))),
    "threshold": st.integers(1, 100),
    "minPercent": st.integers(0, 100),
    "period": st.integers(100, 60_000).map(lambda ms: ms / 1000),
    "reconcilePeriod": st.integers(100, 3_600_000).map(lambda ms: ms / 1000),
    "callTimeout": st.integers(100, 60_000).map(lambda ms: ms / 1000),
    "busyPoll": st.integers(0, 1000).map(lambda us: us / 1_000_000),
    "drainTimeout": st.integers(0, 600_000).map(lambda ms: ms / 1000),
    "timeout": st.integers(10, 5000).map(lambda ms: ms / 1000),
    "perSecond": st.integers(1, 1000),
    "node": st.sampled_from(["", "node-1", "a.b", "1"]),
    "skipLabel": st.sampled_from(["", "a=b", "example.com/skip-it=", "x/y=no"]),
    "settings": st.dictionaries(
        st.sampled_from(["10-x", "koordlet", "99-on", "1.0"]),
        st.builds(
            HookSettings,
            st.none() | st.integers(1, 100_000).map(lambda ms: ms / 1000),
            st.none() | st.sampled_from(FailurePolicy),
            st.none() | st.dictionaries(st.text(), PLAIN, max_size=4).map(FrozenMapping),
        ),
        max_size=3,
    ).map(FrozenMapping),
    "serverUsers": st.sets(st.integers(0, 2**32 - 2)).map(lambda users: tuple(sorted(users))),
    "percent": st.integers(0, 100),
    "allowed": st.just(()),
    "afterRejections": st.integers(1, 1000),
    "perMinute": st.integers(1, 600),
    "keepAwayFor": st.integers(1, 86_400).map(float),
    "podsPerStep": st.integers(1, 1000),
    "stepPeriod": st.integers(100, 3_600_000).map(lambda ms: ms / 1000),
    **dict.fromkeys(
        ("podSelector", "namespaceSelector"),
        st.builds(
            LabelSelector,
            st.dictionaries(LABELS, LABEL_VALUES, max_size=3).map(lambda found: tuple(sorted(found.items()))),
            st.lists(
                st.builds(
                    LabelExpression,
                    LABELS,
                    st.sampled_from([LabelOperator.IN, LabelOperator.NOT_IN]),
                    st.lists(LABEL_VALUES, min_size=1, max_size=3, unique=True).map(tuple),
                )
                | st.builds(
                    LabelExpression,
                    LABELS,
                    st.sampled_from([LabelOperator.EXISTS, LabelOperator.DOES_NOT_EXIST]),
                ),
                max_size=3,
            ).map(tuple),
        ),
    ),
    "explainHistory": st.integers(0, 100_000),
    **dict.fromkeys(
        ("namespaces", "systemNamespaces", "skipLabelNamespaces"),
        st.lists(st.sampled_from(["*", "kube-system", "team-?", "0", "1-*", "no", "on"]), unique=True).map(
            lambda names: Namespaces(tuple(names))
        ),
    ),
    **dict.fromkeys(
        ("maxCPUsPerPod", "maxCPUsPerNamespace", "maxCPUsPerNode", "sharedFloor", "sharedFloorPerNUMANode"),
        st.none() | st.integers(0, 65536),
    ),
}


def values(setting: Setting, default: Any) -> st.SearchStrategy[Any]:
    if setting.key in SPECIAL:
        return SPECIAL[setting.key]
    if isinstance(default, bool):
        return st.booleans()
    if isinstance(default, enum.Enum):
        texts = [word for word in setting.kind.schema["enum"] if isinstance(word, str)]
        return st.sampled_from([type(default)(word) for word in texts])
    if isinstance(default, Path):
        return PATHS
    assert default is None, f"no values for {setting.key}"
    return (
        AMOUNTS
        if setting.kind.tags >= {"int", "float"} and "bool" not in setting.kind.tags
        else st.none() | PATHS
    )


@st.composite
def parts(draw: st.DrawFn, part: Any) -> Any:
    changes = {}
    for item, _, setting in keys(part):
        default = getattr(part, item.name)
        if setting is None:
            changes[item.name] = draw(parts(default))
        elif draw(st.booleans()):
            changes[item.name] = draw(values(setting, default))
    return replace(part, **changes)


@settings(max_examples=100, deadline=None)
@given(parts(Config()))
def test_a_written_configuration_reads_back(config: Config) -> None:
    """Keys may contradict each other here, as in most random configurations."""
    with mock.patch("proxy.config.load.check", return_value=[]):
        assert parse(as_yaml(config), "f") == config
        assert parse(as_yaml(config, comments=False), "f") == config


@settings(max_examples=100, deadline=None)
@given(parts(Config()))
def test_a_configuration_reaches_another_process_unchanged(config: Config) -> None:
    assert from_plain(json.loads(json.dumps(to_plain(config)))) == config


@settings(max_examples=100, deadline=None)
@given(parts(Config()), parts(Config()))
def test_each_changed_key_is_either_live_or_waits_for_a_restart(running: Config, wanted: Config) -> None:
    effect = with_live_values(running, wanted)
    applied, waiting = changes(running, effect), changes(effect, wanted)
    assert all(change.live for change in applied)
    assert not any(change.live for change in waiting)
    assert {c.key for c in applied} | {c.key for c in waiting} == {c.key for c in changes(running, wanted)}
    assert {c.key for c in applied}.isdisjoint(c.key for c in waiting)
