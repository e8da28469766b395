"""No pod, whatever its author writes, changes the node or other tenants.

The honest pods of ``tenants`` are played with hostile pods between their steps, and a restart in the
middle.
Each of these must hold, for every attack that is known and for random ones:

* the shared pool keeps its floor, and a hostile pod never owns a CPU;
* the honest pods' calls are answered as without the hostile pods, and their records and CPUs are the same;
* no message (an answer, a problem, a line of the log, a field of status or explain) is over 2 kB;
* the loop is not held for more than 20 ms at a time (of CPU time, on a CPU of the usual speed).
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hostile_pods import (
    ATTACKS,
    CLASSES,
    KEYS,
    NO_CPU_LIMIT,
    PARENTS,
    QOS,
    STATUS,
    TENTH_OF_A_CPU,
    HostilePod,
    attack,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.security.tenants import CPUS, DAY, HOLD_MS, Visits, play, slowness

_quiet: dict[int, dict[str, Any]] = {}


def check(visits: Visits, restart_at: int = 5) -> None:
    """Play the honest pods with and without the hostile ones."""
    if restart_at not in _quiet:
        _quiet[restart_at] = play((), restart_at).seen
    held = []
    for _ in range(
        3
    ):  # a single delay, such as a garbage collection, is ignored: one that a pod causes occurs each time
        played = play(visits, restart_at)
        assert played.seen == _quiet[restart_at]
        limit = HOLD_MS * slowness()
        held.append(f"{played.held_ms:.1f} ms of {limit:.1f} ms by {played.held_by}")
        if played.held_ms < limit:
            return
    pytest.fail(f"the loop was held for {'; '.join(held)}")


def test_honest_pods_without_hostile_ones() -> None:
    seen = play(()).seen
    kernel = seen["kernel"]
    assert (kernel["lse"], kernel["lsr"], kernel["late"]) == ("2-3", "4", "7")
    assert kernel["agent"] == "1,9"
    assert kernel["shop"] == kernel["ls"]
    assert seen["late pools"] == seen["ls pools"] != seen["shop pools"]
    assert len(kernel) == len(DAY)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ATTACKS)
def test_an_attack_by_three_pods(kind: str, seed: int) -> None:
    dice = random.Random(f"{kind} {seed}")
    check([(step, attack(kind, dice, CPUS), "") for step in (0, 2, 6)])


@pytest.mark.parametrize("label", CLASSES)
@pytest.mark.parametrize("parent", PARENTS)
def test_no_qos_class_alone_permits_named_cpus(label: str, parent: str) -> None:
    labels = {QOS: label} if label else {}
    resources = NO_CPU_LIMIT if parent == "besteffort" else TENTH_OF_A_CPU
    annotations = {STATUS: json.dumps({"cpuset": f"0-{CPUS - 2}"})}
    check([(0, HostilePod("greedy", labels, annotations, parent, resources), "")])


def test_a_record_that_cannot_be_encoded_costs_no_other_record() -> None:
    """A batch has records of several pods."""
    dice = random.Random(1)
    check([(step, attack("surrogate-key", dice, CPUS), "") for step in range(len(DAY))])


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["0-15", "2-3", "0,2,4", "\ud800", "x" * 3000, "1e400", "-1", "0-99999999999"]),
)
NAMES = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=40),
    st.sampled_from(
        [
            "cpuset",
            "CPUSET",
            "numaNodeResources",
            "cpuSharedPools",
            "node",
            "resources",
            "cpu",
            "numa",
            "\ud800",
        ]
    ),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
ANNOTATION = st.one_of(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=100),
    JSON.map(json.dumps),
    st.fixed_dictionaries({"cpuset": SCALARS}, optional={"numaNodeResources": JSON}).map(json.dumps),
)
RANDOM_POD = st.builds(
    lambda label, annotations, parent, skip: HostilePod(
        "random",
        ({QOS: label} if label else {}) | skip,
        annotations,
        parent,
        NO_CPU_LIMIT if parent == "besteffort" else TENTH_OF_A_CPU,
    ),
    st.sampled_from(CLASSES) | st.text(st.characters(exclude_categories=("Cs",)), max_size=30),
    st.dictionaries(st.sampled_from(KEYS), ANNOTATION, max_size=3),
    st.sampled_from(PARENTS),
    st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=10), st.just("true"), max_size=2
    ),
)
KNOWN_POD = st.builds(
    lambda kind, seed: attack(kind, random.Random(seed), CPUS),
    st.sampled_from(sorted(ATTACKS)),
    st.integers(0, 99),
)
POD_NAME = st.sampled_from(["", "evil", "x" * 253]) | st.text(
    st.characters(exclude_categories=("Cs",)), max_size=300
)


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=[
        Phase.explicit,
        Phase.generate,
    ],  # a scenario takes too long to be repeated while a failure is shrunk
    suppress_health_check=list(HealthCheck),
)
@given(
    st.lists(
        st.tuples(st.integers(0, len(DAY) - 1), RANDOM_POD | KNOWN_POD, POD_NAME), min_size=1, max_size=6
    ),
    st.integers(0, len(DAY) - 1),
)
def test_random_pods_change_nothing_for_others(visits: Visits, restart_at: int) -> None:
    check(visits, restart_at)
