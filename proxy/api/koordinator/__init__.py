"""Message classes generated from ``proto/koordinator/hook.proto`` by ``make proto``; not edited by hand."""
