"""A directory that behaves as a cgroup hierarchy does under the kernel's rules."""
