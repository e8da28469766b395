"""Adapters that perform effects and read facts: cgroups, the runtime, systemd, kubelet, the ledger."""
