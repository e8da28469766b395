"""Applying cpusets to the kernel and the runtime, with read-back."""
