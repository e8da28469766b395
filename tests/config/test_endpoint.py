"""Addresses of sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.config.endpoint import parse_endpoint, show_endpoint
from proxy.model.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("unix:///run/x.sock", "/run/x.sock"),
        ("unix:/run/x.sock", "/run/x.sock"),
        ("/run/x.sock", "/run/x.sock"),
        (" UNIX:///run//y/../x.sock ", "/run/x.sock"),
        ("unix:////run/x.sock", "/run/x.sock"),
        ("/" + "a" * 106, "/" + "a" * 106),
    ],
)
def test_accepted(text: str, path: str) -> None:
    assert parse_endpoint(text) == Path(path)
    assert parse_endpoint(show_endpoint(Path(path))) == Path(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tcp://127.0.0.1:1", "only unix sockets are served, not tcp:"),
        ("npipe:////./pipe/x", "only unix sockets are served, not npipe:"),
        ("unix://run/x.sock", "must be absolute; unix:///run/x.sock has three slashes"),
        ("run/x.sock", "must be absolute"),
        ("@abstract", "must be absolute"),
        ("", "must be absolute"),
        ("unix://", "must be absolute"),
        ("/run/", "cannot be the name of a socket"),
        ("/run/a\0b", "cannot be the name of a socket"),
        ("/" + "a" * 107, "the path is 108 bytes long, and unix sockets end at 107"),
        ("/" + "ä" * 54, "the path is 109 bytes long"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_endpoint(text)
    assert str(caught.value).startswith("cannot use ")
