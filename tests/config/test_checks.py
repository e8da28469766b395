"""Settings against a machine."""

from __future__ import annotations

import pytest

from proxy.config import check_against, parse
from proxy.model.errors import ConfigError
from proxy.model.idset import CpuSet
from proxy.model.machine import Cpu, Machine, NumaNode

MACHINE = Machine(
    cpus=tuple(Cpu(i, i, 0) for i in (0, 1, 3)),
    nodes=(NumaNode(0, CpuSet((0, 1, 3))),),
    present=CpuSet(range(4)),
    possible=CpuSet(range(8)),
)


@pytest.mark.parametrize("cpus", ["", "0", "0-1", "3"])
def test_possible(cpus: str) -> None:
    check_against(parse(f"reservedSystemCPUs: '{cpus}'", "f.yaml"), MACHINE)


@pytest.mark.parametrize(
    ("cpus", "words"),
    [
        ("0-3", r"reservedSystemCPUs: CPU 2 is offline \(online: 0-1,3\)"),
        ("2,7-8", "there is no CPU 7-8"),
        ("0-1,3", "all CPUs are reserved, and none is left for containers"),
    ],
)
def test_impossible(cpus: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^cannot use the configuration f\.yaml: .*{words}"):
        check_against(parse(f"reservedSystemCPUs: '{cpus}'", "f.yaml"), MACHINE)
