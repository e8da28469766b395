"""The text that ``topoproxy release`` prints at its end."""

from __future__ import annotations

from proxy.cli.release import result_text


def test_one_container_is_counted_in_the_singular() -> None:
    first, _ = result_text({"containers": 1, "updated": 0}).splitlines()
    assert first == (
        "released: 1 container has what it would have without topoproxy (0 were updated at the runtime)"
    )
    first, _ = result_text({"containers": 2, "updated": 1}).splitlines()
    assert first == (
        "released: 2 containers have what they would have without topoproxy (1 was updated at the runtime)"
    )
