"""The limit on requests, as kubelet's: a token bucket (kubernetes v1.35 pkg/kubelet/apis/grpc/ratelimit.go).

It starts full. A request takes one token and is rejected where there is none; nothing waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

PER_SECOND: Final = 100
BURST: Final = 10
"""kubelet's ``DefaultQPS`` and ``DefaultBurstTokens`` (pkg/kubelet/apis/podresources/constants.go)."""


class RequestLimit:
    """A token bucket; safe to use from several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start with a full bucket.

        Args:
            clock: Seconds that only grow.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens, self._filled = float(BURST), clock()

    def allows(self) -> bool:
        """Take a token; False where there is none."""
        with self._lock:
            now = self._clock()
            self._tokens = min(BURST, self._tokens + (now - self._filled) * PER_SECOND)
            self._filled = now
            if self._tokens < 1:
                return False
            self._tokens -= 1
            return True
