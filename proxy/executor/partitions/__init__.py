"""Partitions of cgroup v2 for owners of CPUs."""
