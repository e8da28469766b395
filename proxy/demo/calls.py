"""The CRI calls that the demonstration makes and answers, and errors of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.api.cri import api_pb2 as pb

if TYPE_CHECKING:
    import grpc

METHODS = {
    name: (getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response"))
    for name in (
        "Version",
        "Status",
        "RunPodSandbox",
        "StopPodSandbox",
        "RemovePodSandbox",
        "PodSandboxStatus",
        "ListPodSandbox",
        "CreateContainer",
        "StartContainer",
        "StopContainer",
        "RemoveContainer",
        "UpdateContainerResources",
        "ContainerStatus",
        "ListContainers",
    )
}
"""The unary calls of the RuntimeService that are answered, with their request and answer classes."""


class CallRefused(Exception):  # noqa: N818 - it is an answer, not a failure of ours
    """A call that ends with a gRPC status.

    Attributes:
        code: The status code.
        text: The status message.
    """

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
