"""CFS quotas: removed from owners of CPUs, and restored."""
