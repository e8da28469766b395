"""Reads when a certificate expires: no other field of X.509 is needed (RFC 5280 section 4.1).

Certificate and TBSCertificate are sequences in DER (distinguished encoding rules); of the second's members,
``validity`` follows the optional version (tag ``[0]``), the serial number, the signature's algorithm and the
issuer.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from datetime import UTC, datetime

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x17, 0x18
_LONG = 0x80
_VALIDITY = 3
"""Members before ``validity``, without the version."""


def expiry(pem: bytes) -> float:
    """Return when the first certificate of a PEM file expires, in seconds since the epoch.

    Raises:
        ValueError: There is no certificate, or it cannot be read.
    """
    match = _PEM.search(pem)
    if match is None:
        raise ValueError("there is no certificate in it")
    try:
        der = base64.b64decode(match[1])
        (_, certificate), *_ = _members(der)
        (_, signed), *_ = _members(certificate)
        members = [content for tag, content in _members(signed) if tag != _VERSION]
        _, (tag, text) = _members(members[_VALIDITY])
        form = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}[tag]
        return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC).timestamp()
    except (binascii.Error, IndexError, KeyError, ValueError):
        raise ValueError("the certificate cannot be read") from None


def _members(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tag and the content of each DER value."""
    at = 0
    while at < len(content):
        tag, size = content[at], content[at + 1]
        at += 2
        if size >= _LONG:
            more = size - _LONG
            size = int.from_bytes(content[at : at + more], "big")
            at += more
        if at + size > len(content):
            raise ValueError("a value ends too early")
        yield tag, content[at : at + size]
        at += size
