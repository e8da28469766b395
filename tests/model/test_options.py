from __future__ import annotations

import pytest

from proxy.model.errors import ConfigError
from proxy.model.options import (
    CpuOptions,
    TopologyOptions,
    TopologyPolicy,
    check_cpu_options,
    check_topology_options,
    parse_cpu_options,
    parse_topology_options,
)


@pytest.mark.parametrize("value", ["1", "t", "T", "true", "TRUE", "True", True, 1])
def test_every_true_of_go_turns_an_option_on(value: object) -> None:
    assert parse_cpu_options({"full-pcpus-only": value}) == CpuOptions(full_pcpus_only=True)


@pytest.mark.parametrize("value", ["0", "f", "F", "false", "FALSE", "False", False, 0])
def test_every_false_of_go_leaves_an_option_off(value: object) -> None:
    assert parse_cpu_options({"align-by-socket": value}) == CpuOptions()


@pytest.mark.parametrize("value", ["", "yes", "on", "tRUE", " true", "2", 2, 1.0, None, ["true"]])
def test_other_texts_are_not_booleans(value: object) -> None:
    with pytest.raises(ConfigError, match=r"full-pcpus-only is .*, which is not a boolean"):
        parse_cpu_options({"full-pcpus-only": value})


def test_option_names_match_kubelet() -> None:
    options = CpuOptions(strict_cpu_reservation=True)
    assert options.as_kubelet() == {
        "full-pcpus-only": False,
        "strict-cpu-reservation": True,
        "prefer-align-cpus-by-uncorecache": False,
        "distribute-cpus-across-numa": False,
        "distribute-cpus-across-cores": False,
        "align-by-socket": False,
    }
    assert parse_cpu_options(dict(options.as_kubelet())) == options
    with pytest.raises(
        ConfigError, match=r"^cannot use cpuManagerPolicyOptions: 'full_pcpus_only' is unknown"
    ):
        parse_cpu_options({"full_pcpus_only": "true"})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("full-pcpus-only", "distribute-cpus-across-cores"),
        ("distribute-cpus-across-numa", "distribute-cpus-across-cores"),
        ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-cores"),
        ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-numa"),
    ],
)
def test_pairs_that_exclude_each_other(one: str, other: str) -> None:
    with pytest.raises(ConfigError, match=f"{one} and {other} exclude each other"):
        parse_cpu_options({other: "true", one: "true"})
    parse_cpu_options({other: "true", one: "false"})


def test_pairs_that_go_together() -> None:
    assert parse_cpu_options(
        {"full-pcpus-only": "true", "distribute-cpus-across-numa": "true", "align-by-socket": "true"}
    ) == CpuOptions(full_pcpus_only=True, distribute_cpus_across_numa=True, align_by_socket=True)


def test_align_by_socket() -> None:
    on = CpuOptions(align_by_socket=True)
    check_cpu_options(on, TopologyPolicy.RESTRICTED, sockets=2, nodes=2)
    check_cpu_options(CpuOptions(), TopologyPolicy.SINGLE_NUMA_NODE, sockets=4, nodes=2)
    with pytest.raises(
        ConfigError, match="align-by-socket and topologyManagerPolicy single-numa-node exclude"
    ):
        check_cpu_options(on, TopologyPolicy.SINGLE_NUMA_NODE, sockets=2, nodes=2)
    with pytest.raises(ConfigError, match="this machine has 4 sockets and 2 NUMA nodes"):
        check_cpu_options(on, TopologyPolicy.BEST_EFFORT, sockets=4, nodes=2)


@pytest.mark.parametrize(("value", "most"), [("8", 8), ("12", 12), ("+12", 12), (64, 64), ("008", 8)])
def test_the_limit_of_nodes(value: object, most: int) -> None:
    assert parse_topology_options({"max-allowable-numa-nodes": value}) == TopologyOptions(False, most)


@pytest.mark.parametrize("value", ["", "8 ", "1_0", "8.0", 8.0, True, None, "٨", "9" * 30])
def test_texts_that_are_not_numbers_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"max-allowable-numa-nodes is .*, which is not a whole number"):
        parse_topology_options({"max-allowable-numa-nodes": value})


def test_topology_options_are_read_within_their_limits() -> None:
    assert parse_topology_options({"prefer-closest-numa-nodes": "t"}) == TopologyOptions(True)
    assert parse_topology_options({"prefer-closest-numa-nodes": "f"}) == parse_topology_options(None)
    with pytest.raises(ConfigError, match="max-allowable-numa-nodes is 7, it must be 8 or more"):
        parse_topology_options({"max-allowable-numa-nodes": "7"})
    with pytest.raises(ConfigError, match=r"topologyManagerPolicyOptions: 'x' is unknown \(known: prefer-"):
        parse_topology_options({"x": "1"})
    assert TopologyOptions().as_kubelet() == {
        "prefer-closest-numa-nodes": False,
        "max-allowable-numa-nodes": 8,
    }


def test_options_against_the_machine() -> None:
    check_topology_options(TopologyOptions(), TopologyPolicy.RESTRICTED, 64, distances=False)
    check_topology_options(TopologyOptions(True, 16), TopologyPolicy.RESTRICTED, 16, distances=True)
    check_topology_options(TopologyOptions(True, 16), TopologyPolicy.NONE, 17, distances=False)
    with pytest.raises(ConfigError, match="this machine has 17 NUMA nodes, max-allowable-numa-nodes is 16"):
        check_topology_options(TopologyOptions(False, 16), TopologyPolicy.BEST_EFFORT, 17, distances=True)
    with pytest.raises(ConfigError, match="prefer-closest-numa-nodes needs the distances"):
        check_topology_options(TopologyOptions(True), TopologyPolicy.BEST_EFFORT, 2, distances=False)
