"""A directory that behaves like a cgroup hierarchy, with the kernel's rules."""
