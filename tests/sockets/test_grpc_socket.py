"""The error that a refused caller receives."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.sockets.grpc_socket import refuse_call


class AbortedError(Exception):
    """Raised in the place of the error by which gRPC ends a call."""


class Context:
    """Keeps the error with which a call ends."""

    def __init__(self) -> None:
        self.logged = ""

    def abort(self, _code: Any, message: str) -> None:
        self.logged = message
        raise AbortedError


@pytest.mark.parametrize("odd", ["x", "\ud800", "\u4e2d"])
def test_a_refusal_can_be_encoded_and_is_short(odd: str) -> None:
    context = Context()
    with pytest.raises(AbortedError):
        refuse_call(context, 9, "cannot place ns/" + odd * 10**6)  # type: ignore[arg-type]  # what it uses
    assert context.logged.startswith("cannot place ns/")
    assert 1900 < len(context.logged.encode()) <= 2000
