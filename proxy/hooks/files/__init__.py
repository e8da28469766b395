"""Hooks that are files of Python: which count, who may write them, reading, loading, their own settings."""
