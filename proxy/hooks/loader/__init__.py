"""Hooks that are Python files: which files count, permissions, reading, loading, and their settings."""
