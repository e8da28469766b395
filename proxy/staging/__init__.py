"""Staged enforcement: applying the plan to running pods, and giving them back, a few at a time."""
