"""Hooks: points in a call's way where others may look and adjust (DESIGN 2; authors begin at ``api``)."""
