"""The CRI front end: sockets around the relay, interceptors, and views of CRI messages."""
