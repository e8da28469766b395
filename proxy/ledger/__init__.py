"""Durable state: the placement of each container, kept through restarts and crashes."""

from proxy.ledger.journal import FileLedger
from proxy.ledger.opening import open_ledger, read_entries

__all__ = ["FileLedger", "open_ledger", "read_entries"]
