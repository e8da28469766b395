"""The credentials for the API server: a kubeconfig, or the service account token of the pod.

The token is bound to the pod and expires; kubelet writes a new one into the same file in time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from lightkube.core.exceptions import ConfigError

from proxy.config.cluster import ClusterConfig
from proxy.model.errors import UnavailableError
from proxy.open_file import open_file

if TYPE_CHECKING:
    from lightkube import KubeConfig
    from lightkube.config.kubeconfig import SingleConfig

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The directory where kubelet mounts the service account of a pod."""


class NoCredentialsError(UnavailableError):
    """There are no credentials, or they cannot be read."""


def read_credentials(config: ClusterConfig) -> SingleConfig:
    """Read the address of the API server and the credentials.

    Args:
        config: Names the kubeconfig.

    Raises:
        NoCredentialsError: There are none, or they cannot be read.
    """
    from lightkube import KubeConfig

    named = config.kubeconfig or (Path(os.environ["KUBECONFIG"]) if os.environ.get("KUBECONFIG") else None)
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").exists()
    file = SERVICE_ACCOUNT if config.kubeconfig is None and in_pod else named
    if file is None:
        raise NoCredentialsError("cannot connect to the API server: there are no credentials")
    try:
        if file is not SERVICE_ACCOUNT:
            return _selected(_kubeconfig(file.expanduser()))
        credentials = KubeConfig.from_service_account(file).get()
    except OSError as error:
        cause = error.strerror or str(error)
        raise NoCredentialsError(f"cannot read the credentials in {file}: {cause}") from error
    except (ValueError, LookupError, TypeError, ConfigError) as error:
        raise NoCredentialsError(f"cannot read the credentials in {file}: {error}") from error
    assert credentials is not None, "those of a service account have one context"
    return credentials


def _kubeconfig(file: Path) -> KubeConfig:
    """Read a kubeconfig; a file that is being written may be empty or cut off anywhere.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not a kubeconfig.
    """
    import yaml
    from lightkube import KubeConfig

    try:
        with open_file(file) as stream:
            content = yaml.safe_load(stream.read().decode())
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        # The text of the error may quote a part of the line, and this part may be a credential.
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f": line {mark.line + 1} is not valid YAML"
        raise ValueError(f"it is not a kubeconfig{where}") from error
    if not isinstance(content, dict):
        raise ValueError("it is not a kubeconfig")  # noqa: TRY004 - one kind of error for all bad content
    lists = {key: content.get(key) or [] for key in ("clusters", "contexts", "users")}
    try:
        return KubeConfig.from_dict({**content, **lists}, fname=file)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError("it is not a kubeconfig") from error
    except msgspec.MsgspecError as error:
        raise ValueError(f"it is not a kubeconfig: {error}") from error


def _selected(config: KubeConfig) -> SingleConfig:
    """Return the cluster and the user of the current context.

    Raises:
        ValueError: One of them is missing.
    """
    name = config.current_context
    if not name:
        raise ValueError("it names no current context")
    context = config.contexts.get(name)
    if context is None:
        raise ValueError(f"its current context {name} is missing")
    for kind, known, wanted in (
        ("cluster", config.clusters, context.cluster),
        ("user", config.users, context.user),
    ):
        if not wanted:
            raise ValueError(f"context {name} names no {kind}")
        if wanted not in known:
            raise ValueError(f"context {name} names the {kind} {wanted}, which is missing")
    found = config.get()
    assert found is not None, "it has a current context"
    return found


def credential_files(credentials: SingleConfig) -> Iterator[Path]:
    """Yield the files that credentials are read from: the kubeconfig, the token, and the certificates."""
    user = credentials.user
    named = [credentials.cluster.certificate_auth]
    named += [user.client_cert, user.client_key, user.token_file] if user is not None else []
    if credentials.fname is not None:
        yield credentials.fname
    for name in named:
        if name:
            yield Path(credentials.abs_file(name))
