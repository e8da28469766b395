"""The demonstration and its stand-in: a small runtime, a described machine, a cgroup tree in a directory."""
