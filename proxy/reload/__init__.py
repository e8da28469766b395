"""Changing the configuration of a running daemon."""
