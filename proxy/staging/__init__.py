"""Staged enforcement: applying the plan to running pods, and restoring them, a few at a time."""
