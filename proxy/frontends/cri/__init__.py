"""The wire: sockets around the relay, interceptors, views over CRI messages."""
