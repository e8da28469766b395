"""The status codes of gRPC, as its ``doc/statuscodes.md`` numbers them."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class GrpcStatus(IntEnum):
    """How a call has ended."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


NO_ANSWER: Final = (GrpcStatus.CANCELLED, GrpcStatus.DEADLINE_EXCEEDED, GrpcStatus.UNAVAILABLE)
"""Codes without an answer from the peer: it is unknown whether the peer has executed the call."""
