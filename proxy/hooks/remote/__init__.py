"""Hooks in other processes: servers of Koordinator's protocol behind unix sockets (reference a.5 to b)."""
