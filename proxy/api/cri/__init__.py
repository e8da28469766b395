"""Message classes generated from ``proto/cri/api.proto`` by ``make proto``; not edited by hand."""
