"""Requests to kubelet's server: what is sent, which answers are refused, and the deadline."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from proxy.backends.kubelet import fetch
from proxy.backends.kubelet.fetch import fetch_pods
from proxy.backends.kubelet.settings import KubeletError, KubeletSettings

LONG_TIMEOUT_S = 60.0
"""Seconds: more than any machine needs."""


def failure(**settings: Any) -> str:
    with pytest.raises(KubeletError) as caught:
        fetch_pods(KubeletSettings(**{"timeout": LONG_TIMEOUT_S, **settings}))
    return str(caught.value)


def test_the_pod_list_is_requested_at_its_usual_path(pods_server: Any) -> None:
    pods_server.items = [{"metadata": {"uid": "u-1"}}]
    content = fetch_pods(KubeletSettings(pods_url=pods_server.url, timeout=LONG_TIMEOUT_S))
    assert b'"u-1"' in content
    fetch_pods(KubeletSettings(pods_url=f"{pods_server.url}/other/pods?all=1", timeout=LONG_TIMEOUT_S))
    assert [path for path, _ in pods_server.seen] == ["/pods", "/other/pods?all=1"]
    assert "Authorization" not in pods_server.seen[0][1]


def test_the_token_is_read_for_each_request(
    tls_server: Any, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    settings = KubeletSettings(
        pods_url=tls_server.url, token_file=str(token), ca_file=str(certificate[0]), timeout=LONG_TIMEOUT_S
    )
    for word in ("first", "second"):
        token.write_text(f"{word}\n")
        fetch_pods(settings)
    assert [headers["Authorization"] for _, headers in tls_server.seen] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "it is not a regular file"),
        (os.mkfifo, "it is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
        (lambda path: path.write_text("x" * (1 << 16) + "x"), "it is larger than 64 KiB"),
        (lambda path: path.write_bytes(b"\xff"), "'ascii' codec can't decode"),
    ],
    ids=["none", "directory", "pipe", "device", "large", "binary"],
)
def test_a_token_that_cannot_be_read_costs_no_time(
    tls_server: Any, tmp_path: Path, make: Callable[[Path], object], cause: str
) -> None:
    make(tmp_path / "token")
    reported = failure(pods_url=tls_server.url, token_file=str(tmp_path / "token"))
    assert f"cannot read the token in {tmp_path}/token: {cause}" in reported
    assert not tls_server.seen


def test_a_token_goes_over_tls_only(pods_server: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    reported = failure(pods_url=pods_server.url, token_file=str(tmp_path / "token"))
    assert reported.endswith("a token is sent over https only")
    assert not pods_server.seen


@pytest.mark.parametrize("content", ["", "two words", "a\r\nHost: b", "\x01"])
def test_an_invalid_token_is_not_sent(tls_server: Any, tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    reported = failure(pods_url=tls_server.url, token_file=str(tmp_path / "token"), insecure=True)
    assert "it is not one word" in reported
    assert "two" not in reported
    assert not tls_server.seen


def test_a_missing_token_is_named(tmp_path: Path) -> None:
    reported = failure(pods_url="https://127.0.0.1:1", token_file=str(tmp_path / "none"))
    assert f"cannot read the token in {tmp_path / 'none'}: " in reported


def test_a_certificate_without_a_trusted_issuer_is_refused(tls_server: Any) -> None:
    assert "CERTIFICATE_VERIFY_FAILED" in failure(pods_url=tls_server.url)
    assert not tls_server.seen
    fetch_pods(KubeletSettings(pods_url=tls_server.url, insecure=True, timeout=LONG_TIMEOUT_S))


def test_a_certificate_for_another_host_is_refused(tls_server: Any, certificate: tuple[Path, Path]) -> None:
    url = tls_server.url.replace("127.0.0.1", "localhost")
    assert "localhost" in failure(pods_url=url, ca_file=str(certificate[0]))
    fetch_pods(KubeletSettings(pods_url=url, insecure=True, timeout=LONG_TIMEOUT_S))


def test_the_client_certificate_is_presented(
    tls_server: Any, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    names: list[object] = []

    def reply(to: BaseHTTPRequestHandler) -> None:
        connection: Any = to.connection
        names.append((connection.getpeercert() or {}).get("subject"))
        to.send_error(503)

    tls_server.reply = reply
    cert, key = map(str, certificate)
    both = tmp_path / "both.pem"
    both.write_bytes(certificate[0].read_bytes() + certificate[1].read_bytes())
    settings = {"pods_url": tls_server.url, "ca_file": cert}
    failure(**settings)
    failure(**settings, cert_file=cert, key_file=key)
    failure(**settings, cert_file=str(both))
    assert names == [None, *[((("commonName", "node-1"),),)] * 2]


def test_tls_works_in_a_process_that_blocks_its_modules(
    tls_server: Any, certificate: tuple[Path, Path]
) -> None:
    """The daemon blocks the TLS modules too: only this client may load them."""
    tls_server.items = [{"metadata": {"uid": "u-1"}}]
    code = """
import sys
from proxy import memory_trim
memory_trim.block_tls_imports()
import asyncio, hashlib, http.client
from proxy.backends.kubelet.fetch import fetch_pods
from proxy.backends.kubelet.settings import KubeletSettings
content = fetch_pods(KubeletSettings(pods_url=sys.argv[1], ca_file=sys.argv[2], timeout=60.0))
assert b'"u-1"' in content, content
"""
    run = [sys.executable, "-c", code, tls_server.url, str(certificate[0])]
    done = subprocess.run(run, capture_output=True, text=True, timeout=LONG_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr


def test_an_encrypted_key_does_not_prompt_for_a_password(
    tls_server: Any, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    openssl = shutil.which("openssl") or ""
    locked = tmp_path / "locked.pem"
    run = [openssl, "ec", "-in", str(certificate[1]), "-aes128", "-passout", "pass:word", "-out", str(locked)]
    subprocess.run(run, check=True, capture_output=True)
    reported = failure(pods_url=tls_server.url, cert_file=str(certificate[0]), key_file=str(locked))
    assert f"cannot use the certificate {certificate[0]}: " in reported


def test_certificates_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    reported = failure(pods_url="https://127.0.0.1:1", ca_file=missing)
    assert f"cannot use the certificates of {missing}: " in reported
    assert f"the certificate {missing}" in failure(pods_url="https://127.0.0.1:1", cert_file=missing)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, b"Unauthorized", "it answers 401 Unauthorized: Unauthorized; name the file of a valid token"),
        (403, b"Forbidden (user=\n x\x1b)", "403 Forbidden: Forbidden (user= x?); allow get on nodes/pods"),
        (404, b"", "it answers 404 Not Found: no reason given"),
        (500, b"x" * 5000, "it answers 500 Internal Server Error: xxx"),
        (302, b"", "it answers 302 Found"),
    ],
)
def test_refused_requests_are_reported(
    pods_server: Any, answer: Any, status: int, body: bytes, message: str
) -> None:
    pods_server.reply = answer(status, body)
    reported = failure(pods_url=pods_server.url)
    assert reported.startswith(f"cannot read the pods of kubelet at {pods_server.url}: ")
    assert message in reported
    assert len(reported) < 400


def raw(*pieces: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    def reply(to: BaseHTTPRequestHandler) -> None:
        for piece in pieces:
            to.wfile.write(piece)

    return reply


def test_an_answer_has_a_largest_size(pods_server: Any, answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "ANSWER_LIMIT_BYTES", 1 << 20)
    pods_server.reply = answer(200, b"x" * (1 << 20))
    assert len(fetch_pods(KubeletSettings(pods_url=pods_server.url, timeout=LONG_TIMEOUT_S))) == 1 << 20
    pods_server.reply = answer(200, b"x" * ((1 << 20) + 1))
    assert failure(pods_url=pods_server.url).endswith("its answer is larger than 1 MiB")
    pods_server.reply = raw(b"HTTP/1.0 200 OK\r\n\r\n", *[b"x" * 65536] * 17)
    assert failure(pods_url=pods_server.url).endswith("its answer is larger than 1 MiB")
    pods_server.reply = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
    assert failure(pods_url=pods_server.url).endswith("its answer is larger than 1 MiB")


def test_an_answer_that_ends_early(pods_server: Any) -> None:
    pods_server.reply = raw(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{}")
    assert failure(pods_url=pods_server.url).endswith("its answer ended after 2 of 10 bytes")


@pytest.mark.parametrize("line", [b"\x16\x03\x01 what?\r\n\r\n", b"", b"HTTP/1.1 2000 OK\r\n\r\n"])
def test_answers_that_are_not_http(pods_server: Any, line: bytes) -> None:
    pods_server.reply = raw(line)
    reported = failure(pods_url=pods_server.url)
    assert not reported.endswith(": ")


@pytest.mark.parametrize(
    "pieces",
    [
        (b"",),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n",),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",),
        (b"HTTP/1.1 403 Forbidden\r\nContent-Length: 9999\r\n\r\n",),
    ],
)
def test_a_server_that_sends_slowly_has_one_deadline(pods_server: Any, pieces: tuple[bytes, ...]) -> None:
    def drip(to: BaseHTTPRequestHandler) -> None:
        for piece in pieces:
            to.wfile.write(piece)
        while not pods_server.over.wait(0.02):
            to.wfile.write(b"1")

    pods_server.reply = drip
    begun = time.monotonic()
    reported = failure(pods_url=pods_server.url, timeout=0.3)
    assert reported.endswith("no complete answer within 0.3 s")
    assert time.monotonic() - begun >= 0.3


def test_a_silent_server_has_the_same_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for scheme in ("http", "https"):
            reported = failure(pods_url=f"{scheme}://127.0.0.1:{port}", timeout=0.2)
            assert reported.endswith("no complete answer within 0.2 s")


def test_a_port_without_a_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    assert "refused" in failure(pods_url=f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://127.0.0.1", "ftp://127.0.0.1: this is not an http or https address"),
        ("127.0.0.1:10250", "this is not an http or https address"),
        ("https://", "https://: this is not an http or https address"),
        ("http://a:b", "'http://a:b': Port could not be cast"),
        ("http://[::1", "'http://[::1': Invalid IPv6 URL"),
    ],
)
def test_invalid_addresses_are_refused(url: str, message: str) -> None:
    reported = failure(pods_url=url)
    assert reported.startswith("cannot read the pods of kubelet at ")
    assert message in reported


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("https://[::1]", ("::1", 443)),
        ("http://10.0.0.1/pods", ("10.0.0.1", 80)),
        ("https://node:10250", ("node", 10250)),
    ],
)
def test_an_address_selects_host_and_port(
    url: str, place: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dialled: list[tuple[str, int]] = []

    def connect(host: str, port: int, _: float) -> socket.socket:
        dialled.append((host, port))
        raise OSError("not here")

    monkeypatch.setattr(fetch, "_connect", connect)
    assert f"kubelet at {url}: not here" in failure(pods_url=url)
    assert dialled == [place]


def test_a_password_in_the_address_is_not_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    reported = failure(pods_url=f"http://me:secret@127.0.0.1:{port}/pods")
    assert "secret" not in reported
    assert f"http://127.0.0.1:{port}/pods: " in reported
