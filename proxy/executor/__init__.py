"""The way of a request: decide, prepare, shrink, forward, commit, grow, through ports."""
