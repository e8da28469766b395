"""Shared code of the shipped hooks (each hook is one file); other hooks may use it too."""
