"""``topoproxy scheduler-extender``: the options that it refuses before it starts."""

from __future__ import annotations

import pytest

from proxy.cli.main import run_command_line

LOOPBACK = ["--plain-http", "--listen", "127.0.0.1:8443"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "it needs --tls-cert, --tls-key and --client-ca (or --plain-http on a loopback address)"),
        (["--plain-http"], "--plain-http needs a loopback address in --listen, not :8443"),
        (
            [*LOOPBACK, "--client-ca", "ca.crt"],
            "--tls-cert, --tls-key and --client-ca have no effect with --plain-http",
        ),
        (["--listen", "8443"], "--listen must be [HOST]:PORT, with a port up to 65535: 8443"),
        (["--listen", ":65536"], "--listen must be [HOST]:PORT, with a port up to 65535: :65536"),
        ([*LOOPBACK, "--lease", "extender"], "--lease must be NAMESPACE/NAME: extender"),
    ],
)
def test_an_option_that_cannot_be_followed_is_refused(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["scheduler-extender", *options]) == 2
    assert capsys.readouterr().err == f"topoproxy: cannot start the extender: {reason}\n"
