"""How kubelet is reached (paths, addresses, timeouts), and the error if it cannot be queried."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from proxy.model.backoff import Backoff
from proxy.model.errors import TopoproxyError

HANG_PAUSE_FACTOR, LONGEST_HANG_PAUSE_S = 10, 30.0
"""A hanging source is not queried for ``HANG_PAUSE_FACTOR`` times the timeout of an exchange, and at most
``LONGEST_HANG_PAUSE_S`` seconds."""


class KubeletSettings(Struct, frozen=True):
    """Where and how kubelet is queried; a source with an empty address is not queried.

    Attributes:
        pods_url: Kubelet's list of pods, such as ``https://NODE:10250`` (if it has no path, ``/pods``).
        configz: Kubelet's configuration, such as ``https://NODE:10250`` (if it has no path, ``/configz``).
        pods_api: Unix socket of the pods API.
        pod_resources: Unix socket of the pod-resources API.
        token_file: Contains the bearer token for the URLs; read for each exchange, because tokens are
            renewed.
        ca_file: Certificates that sign kubelet's, or kubelet's own; empty for those of the system.
        cert_file, key_file: Our client certificate for the URLs, and its key if that is in another file.
        insecure: Do not check kubelet's certificate.
        timeout: Seconds that one exchange may take in total.
    """

    pods_url: str = ""
    pods_api: str = ""
    pod_resources: str = ""
    token_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    insecure: bool = False
    timeout: float = 2.0
    configz: str = ""

    @property
    def retry_backoff(self) -> Backoff:
        """How long a source is not queried after it has hung at least twice in a row.

        Each pod waits for kubelet's answer, and for the whole timeout if kubelet hangs. After the timeout the
        pod is placed without the unknown facts, so it is better not to wait again for each pod.
        """
        pause = min(LONGEST_HANG_PAUSE_S, self.timeout * HANG_PAUSE_FACTOR)
        return Backoff(pause, pause, tolerated=1)


class KubeletError(TopoproxyError):
    """Kubelet cannot be queried, or its answer cannot be used.

    Attributes:
        code: The gRPC status code; 0 if there is none.
        details: The message of the peer; empty if there is none.
    """

    exit_code: ClassVar[int] = 69

    def __init__(self, message: str, code: int = 0, details: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.details = details
