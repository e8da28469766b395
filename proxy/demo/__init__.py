"""The embedded stand-in: a small runtime, a described machine and a cgroup tree in a directory."""
