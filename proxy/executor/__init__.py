"""Performs the engine's effects, through ports: decide, prepare, shrink, forward, commit, grow."""
