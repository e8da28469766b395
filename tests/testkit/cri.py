"""Values and fields of CRI requests, as kubelet sends them and as the runtime gets them."""

from __future__ import annotations

from typing import Any

from proxy.api.cri import api_pb2 as pb

PERIOD_US = 100_000


def cpu_request(cpus: int) -> dict[str, int]:
    """Return the CPU fields of a container with the same number of whole CPUs as request and limit."""
    return {"cpu_shares": 1024 * cpus, "cpu_quota": PERIOD_US * cpus, "cpu_period": PERIOD_US}


TWO_CPUS = cpu_request(2)
FOUR_CPUS = cpu_request(4)


def created_with(call: Any) -> pb.LinuxContainerResources:
    """Return the resources of a CreateContainer call as it was forwarded, such as a ``PlayedCall``."""
    return pb.CreateContainerRequest.FromString(call.sent).config.linux.resources
