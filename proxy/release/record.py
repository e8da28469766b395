"""The ledger's record of a release."""

from __future__ import annotations

KEY = "r/release"
"""Its key; the record holds the stage and since when."""
