"""A machine that changes, and the containers that have less by it."""
