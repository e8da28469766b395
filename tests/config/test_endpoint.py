"""Addresses of sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.config.endpoint import parse_address, parse_endpoint, show_endpoint
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
def test_an_endpoint_is_read_back_as_shown(text: str, path: str) -> None:
    assert parse_endpoint(text) == Path(path)
    assert parse_endpoint(show_endpoint(Path(path))) == Path(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tcp://127.0.0.1:1", "only unix sockets are served, not tcp:"),
        ("npipe:////./pipe/x", "only unix sockets are served, not npipe:"),
        ("unix://run/x.sock", "must be absolute; unix:///run/x.sock has three slashes"),
        ("run/x.sock", "must be absolute"),
        ("@abstract", "must be absolute"),
        ("", "must be absolute"),
        ("unix://", "must be absolute"),
        ("/run/", "cannot be the name of a socket"),
        ("/.", "cannot be the name of a socket"),
        ("unix:///run/..", "cannot be the name of a socket"),
        ("/run/a\0b", "cannot be the name of a socket"),
        ("/" + "a" * 107, "the path is 108 bytes long, a unix socket's at most 107"),
        ("/" + "ä" * 54, "the path is 109 bytes long"),
    ],
)
def test_an_endpoint_that_is_no_unix_socket_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_endpoint(text)
    assert str(caught.value).startswith("cannot use ")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("https://127.0.0.1:10250", "https://127.0.0.1:10250"),
        (" HTTP://LocalHost:10255/ ", "http://localhost:10255"),
        ("https://[::1]:1", "https://[::1]:1"),
        ("https://node-1.example:01234", "https://node-1.example:1234"),
    ],
)
def test_an_address_of_kubelet_is_normalized(text: str, address: str) -> None:
    assert parse_address(text) == address
    assert parse_address(address) == address


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("127.0.0.1:10250", "it must begin with https:// or http://"),
        ("unix:///run/x", "it must begin with https:// or http://"),
        ("https://127.0.0.1:10250/pods", "no path belongs here"),
        ("https://127.0.0.1", "it must be a host and a port, such as https://127.0.0.1:10250"),
        ("https://:10250", "it must be a host and a port"),
        ("https://me:word@a:1", "it must be a host and a port"),
        ("https://a b:1", "it must be a host and a port"),
        ("https://a:0", "ports are 1 to 65535"),
        ("https://a:65536", "ports are 1 to 65535"),
        ("https://[:::1]:1", "':::1'"),
    ],
)
def test_invalid_addresses_of_kubelet(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_address(text)
    assert message in str(caught.value)
