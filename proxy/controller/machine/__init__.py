"""A machine that changes, and who has less by it."""
