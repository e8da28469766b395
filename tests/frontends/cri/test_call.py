"""Answers to intercepted calls."""

from __future__ import annotations

import pytest

from proxy.frontends.cri.call import InterceptedCall


class Link:
    """Records the calls of its methods."""

    def __init__(self) -> None:
        self.refused: list[tuple[int, int, str]] = []
        self.released: list[tuple[int, bytes | None]] = []

    def refuse(self, stream: int, code: int, message: str) -> None:
        self.refused.append((stream, code, message))

    def release(self, stream: int, body: bytes | None, suffix: bytes = b"") -> None:
        self.released.append((stream, body if not suffix else (body or b"") + suffix))


@pytest.mark.parametrize("odd", ["x", "\ud800", "\u4e2d", "\n", "\U0001f600"])
def test_a_refusal_can_be_encoded_and_is_short(odd: str) -> None:
    link = Link()
    InterceptedCall(link, 3, "/runtime.v1.RuntimeService/CreateContainer", b"").refuse(
        9, "cannot place: " + odd * 10**6
    )
    ((stream, code, message),) = link.refused
    assert (stream, code) == (3, 9)
    assert message.startswith("cannot place: ")
    assert message.endswith("...")
    assert message.isprintable()
    assert 1900 < len(message.encode()) <= 2000


def test_a_short_refusal_is_sent_unchanged_and_only_once() -> None:
    link = Link()
    call = InterceptedCall(link, 3, "/runtime.v1.RuntimeService/CreateContainer", b"")
    call.refuse(9, "cannot give CPUs 2-3 to ns/p\u00e4th/c: they are owned")
    call.refuse(9, "again")
    call.release()
    assert link.refused == [(3, 9, "cannot give CPUs 2-3 to ns/p\u00e4th/c: they are owned")]
    assert link.released == []
