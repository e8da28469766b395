"""Hooks: user code that observes and adjusts CRI calls at defined points; authors begin at ``api``."""
