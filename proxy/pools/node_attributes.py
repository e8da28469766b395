"""Attributes that topoproxy adds to a NodeResourceTopology, named as in kubelet's configuration."""

CPU_MANAGER = "cpuManagerPolicy"
CPU_OPTIONS = "cpuManagerPolicyOptions"
MEMORY_MANAGER = "memoryManagerPolicy"
STATIC_MEMORY = "Static"
FIGURES = "topoproxy/figures"
"""The annotation with figures for operators; an object that has it was written by topoproxy."""
