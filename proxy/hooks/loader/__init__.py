"""Hooks that are Python files: which files count, their permissions, reading, loading, their settings."""
