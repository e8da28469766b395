"""Message classes generated from ``proto/containerd/*.proto`` by ``make proto``; not edited by hand."""
