"""The file that registers us with a koord-runtime-proxy, in its directory ``/etc/runtime/hookserver.d``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from proxy.hooks.hook import HookFailurePolicy
from proxy.model.errors import ConfigError

if TYPE_CHECKING:
    from proxy.config.schema import Config

STAGES: Final = (
    "PreRunPodSandbox",
    "PreCreateContainer",
    "PreStartContainer",
    "PostStartContainer",
    "PreUpdateContainerResources",
    "PostStopContainer",
    "PostStopPodSandbox",
)
"""The hooks that we register for; Koordinator v1.8.0 pkg/runtimeproxy/config/config.go defines no others."""


def registration(config: Config) -> str:
    """Return the content of the file ``topoproxy.json`` in the peer's directory.

    The policy is Fail: a container that we have refused or not placed must not run anywhere.

    Raises:
        ConfigError: The protocol is not served.
    """
    socket = config.hooks.serve
    if socket is None:
        raise ConfigError("cannot print the registration: hooks.serve is empty")
    entry = {
        "remote-endpoint": str(socket),
        "failure-policy": HookFailurePolicy.FAIL.value,
        "runtime-hooks": list(STAGES),
    }
    return json.dumps(entry, indent=2) + "\n"
