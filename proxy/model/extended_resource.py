"""Names of extended resources: what device plug-ins may register, and containers may ask for."""

from __future__ import annotations

import re
from typing import Final

_NATIVE: Final = "kubernetes.io/"
_IN_QUOTAS: Final = "requests."
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_DOMAIN_LIMIT: Final = 253


def is_extended_resource(name: str) -> bool:
    """Return whether a name is that of an extended resource, such as ``nvidia.com/gpu``.

    The rule is kubelet's (kubernetes v1.36 pkg/apis/core/v1/helper/helpers.go, IsExtendedResourceName): a DNS
    subdomain, a slash and a name; not of Kubernetes' own domain; and with ``requests.`` before it, as quotas
    have it, it must still be a qualified name.
    """
    if "/" not in name or _NATIVE in name or name.startswith(_IN_QUOTAS):
        return False
    domain, _, rest = name.partition("/")
    domain = f"{_IN_QUOTAS}{domain}"
    labels = domain.split(".")
    return (
        len(domain) <= _DOMAIN_LIMIT
        and all(_LABEL.fullmatch(label) for label in labels)
        and _NAME.fullmatch(rest) is not None
    )
