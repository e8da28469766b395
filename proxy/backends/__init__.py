"""What performs effects and reads facts: cgroups, the runtime, systemd, kubelet, the ledger."""
