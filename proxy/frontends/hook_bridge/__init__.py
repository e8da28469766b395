"""Connects the calls of all front ends to hooks; not imported on a node without hooks."""
