"""Writes of other programs to cpusets: detected, attributed, repaired and reported."""
