"""Message classes generated from ``proto/kubelet/*.proto`` by ``make proto``; not edited by hand."""
