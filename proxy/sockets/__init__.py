"""Unix sockets that the daemon listens on: taking a path, systemd's sockets, and one daemon at a time."""
