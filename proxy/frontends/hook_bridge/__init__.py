"""Between the calls of all front ends and hooks; nothing of it is imported on a node without hooks."""
