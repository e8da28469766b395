"""Find the agent's credentials: a kubeconfig, or the service account token of the pod.

The token of a pod is bound to it and expires; kubelet writes a new one into the same file before that. The
client reads the file again when the API server answers 401. A kubeconfig is read again then, too, by a new
connection (``proxy.agent.api_client``).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.config.cluster import ClusterConfig
from proxy.model.errors import UnavailableError

if TYPE_CHECKING:
    from lightkube.config.kubeconfig import SingleConfig

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class NoCredentialsError(UnavailableError):
    """There is nothing to authenticate with, or it cannot be read."""


def node_name(config: ClusterConfig, environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the Node object."""
    return config.node or environ.get("NODE_NAME", "") or socket.gethostname().lower()


def read_credentials(
    config: ClusterConfig, environ: Mapping[str, str] = os.environ, account: Path = SERVICE_ACCOUNT
) -> SingleConfig:
    """Read the address of the API server and the credentials.

    Args:
        config: Names the kubeconfig.
        environ: The environment of the process.
        account: Where kubelet mounts the service account of a pod.

    Raises:
        NoCredentialsError: There are none, or they cannot be read.
    """
    import msgspec
    import yaml
    from lightkube import KubeConfig
    from lightkube.core.exceptions import ConfigError

    named = config.kubeconfig or (Path(environ["KUBECONFIG"]) if environ.get("KUBECONFIG") else None)
    in_pod = "KUBERNETES_SERVICE_HOST" in environ and (account / "token").exists()
    file = account if config.kubeconfig is None and in_pod else named
    if file is None:
        raise NoCredentialsError("cannot connect to the API server: there are no credentials")
    try:
        read = KubeConfig.from_service_account if file is account else KubeConfig.from_file
        found = read(file).get()
    except (OSError, ValueError, LookupError, TypeError, ConfigError) as error:
        raise NoCredentialsError(f"cannot read the credentials in {file}: {error}") from error
    except (msgspec.MsgspecError, yaml.YAMLError) as error:
        raise NoCredentialsError(f"cannot read the credentials in {file}: {error}") from error
    if found is None:
        raise NoCredentialsError("cannot connect to the API server: the kubeconfig names no context")
    return found
