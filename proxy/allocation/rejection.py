"""The error with which a provider rejects an allocation."""

from __future__ import annotations

UNEXPECTED = "UnexpectedAdmissionError"
"""kubelet's reason for every rejection without a reason of its own."""


class AllocationRejectedError(ValueError):
    """A provider cannot allocate what a container requests; the text becomes the message of the verdict.

    Attributes:
        reason: Reason of the verdict, as kubelet's (``SMTAlignmentError``).
    """

    reason = UNEXPECTED
