"""Writes of others to cpusets: found, told, put back."""
