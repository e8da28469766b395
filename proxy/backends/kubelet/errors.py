"""Errors of requests to kubelet."""

from __future__ import annotations

from typing import ClassVar

from proxy.model.errors import TopoproxyError


class KubeletError(TopoproxyError):
    """Kubelet cannot be asked, or its answer is of no use.

    Attributes:
        code: The gRPC status code; 0 where there is none.
        details: The words of the peer, empty where there are none.
    """

    exit_code: ClassVar[int] = 69

    def __init__(self, message: str, code: int = 0, details: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.details = details
