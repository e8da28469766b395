"""Durable state: the placement of each container, kept through restarts and crashes."""

from proxy.backends.ledger.file_ledger import FileLedger
from proxy.backends.ledger.opening import open_ledger, read_entries

__all__ = ["FileLedger", "open_ledger", "read_entries"]
