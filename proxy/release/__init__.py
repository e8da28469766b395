"""Leaving: every container gets back the cpuset that it would have had without us."""
