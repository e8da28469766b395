"""The end of a certificate, in both forms of time."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import pytest

from proxy.doctor.certificate import expiry

UTC_TIME = b"""-----BEGIN CERTIFICATE-----
MIIBdDCCARmgAwIBAgIUawb0AJBeCNih1Tkr+9VanCaPhZcwCgYIKoZIzj0EAwIw
DzENMAsGA1UEAwwEbm9kZTAeFw0yNjExMjMwNzE5MTVaFw0zNjExMjAwNzE5MTVa
MA8xDTALBgNVBAMMBG5vZGUwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAASey3OG
HFhIqXACzb9z0V3DkYMW+pCrh8zWaAmdeesdTltUbz0p9HH+kPthhAl5OtyIUTbU
xYj+nsExIO0Xbopco1MwUTAdBgNVHQ4EFgQUfpv+Km1JT8QvEfI7EdiIiIg0FmYw
HwYDVR0jBBgwFoAUfpv+Km1JT8QvEfI7EdiIiIg0FmYwDwYDVR0TAQH/BAUwAwEB
/zAKBggqhkjOPQQDAgNJADBGAiEAugK5cfljTyBFER7/qaSkay1oPn9FvpWVGxaX
wOGTJlgCIQD8GltpbId40r96spJFSwTMDBOx2IaLbYTEsyctNPQYuw==
-----END CERTIFICATE-----
"""
GENERALIZED_TIME = b"""-----BEGIN CERTIFICATE-----
MIIBdTCCARugAwIBAgIUIrQzvhw/vKd7gjA0JDMZLYPh0PEwCgYIKoZIzj0EAwIw
DzENMAsGA1UEAwwEbm9kZTAgFw0yNjExMjMwNzE5MTVaGA8yMDU5MTAwMTA3MTkx
NVowDzENMAsGA1UEAwwEbm9kZTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABETu
pc1Midm3MXLPw6Dive4e1Xz45grNAaYcdxxUWfhcyfxYIeCQxCtH1sCZaZx6Sq/X
yFw9fdJ3b/NjqInX5V+jUzBRMB0GA1UdDgQWBBS1NjIzR9o3XL9PrFqUcg3FxK8i
xTAfBgNVHSMEGDAWgBS1NjIzR9o3XL9PrFqUcg3FxK8ixTAPBgNVHRMBAf8EBTAD
AQH/MAoGCCqGSM49BAMCA0gAMEUCIQDX9DXCGLfpjPDmVF0Q8H7CH5buu/Ku/qin
hB/sky1BdAIgfSmHURUKnL+D0jsTzIodCwW5BINZKL1qXvcc3AzQC9g=
-----END CERTIFICATE-----
"""


@pytest.mark.parametrize(
    ("pem", "ends"),
    [
        (UTC_TIME, datetime(2036, 11, 20, 7, 19, 15, tzinfo=UTC)),
        (b"key\n" + GENERALIZED_TIME + UTC_TIME, datetime(2059, 10, 1, 7, 19, 15, tzinfo=UTC)),
    ],
)
def test_the_end_of_the_first_certificate(pem: bytes, ends: datetime) -> None:
    assert expiry(pem) == ends.timestamp()


def pem_of(der: bytes) -> bytes:
    return b"-----BEGIN CERTIFICATE-----\n" + base64.b64encode(der) + b"\n-----END CERTIFICATE-----\n"


DER = base64.b64decode(b"".join(UTC_TIME.splitlines()[1:-1]))


@pytest.mark.parametrize("length", range(0, 130, 7))
def test_a_part_of_a_certificate_cannot_be_read(length: int) -> None:
    with pytest.raises(ValueError, match="the certificate cannot be read"):
        expiry(pem_of(DER[:length]))


def test_a_file_without_a_certificate_has_no_end() -> None:
    with pytest.raises(ValueError, match="there is no certificate in it"):
        expiry(b"-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n")
