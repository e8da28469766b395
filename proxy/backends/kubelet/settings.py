"""How kubelet is reached (paths, addresses, timeouts), and the error where it cannot be queried."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from proxy.model.backoff import Backoff
from proxy.model.errors import TopoproxyError

REST, LONGEST_REST_S = 10, 30.0
"""A hanging source is not queried for this multiple of the time that one exchange may take."""


class KubeletSettings(Struct, frozen=True):
    """Where and how kubelet is queried; what is empty is not queried.

    Attributes:
        pods_url: Kubelet's list of pods, as ``https://NODE:10250`` (``/pods`` where it has no path).
        configz: Kubelet's configuration, as ``https://NODE:10250`` (``/configz`` where it has no path).
        pods_api: Unix socket of the pods API.
        pod_resources: Unix socket of the pod-resources API.
        token_file: Holds the bearer token for addresses; read for each exchange, as tokens are renewed.
        ca_file: Certificates that sign kubelet's, or kubelet's own; empty for those of the system.
        cert_file, key_file: Our own certificate for addresses, and its key where it is in another file.
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
        """How long a source is not queried after it has hung twice in a row, or more often.

        Each pod waits for kubelet's answer, and for the whole timeout where kubelet hangs. A pod is placed
        without facts that are unknown then, so it is better not to wait again for each pod.
        """
        rest = min(LONGEST_REST_S, self.timeout * REST)
        return Backoff(rest, rest, tolerated=1)


class KubeletError(TopoproxyError):
    """Kubelet cannot be queried, or its answer cannot be used.

    Attributes:
        code: The gRPC status code; 0 where there is none.
        details: The message of the peer; empty where there is none.
    """

    exit_code: ClassVar[int] = 69

    def __init__(self, message: str, code: int = 0, details: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.details = details
