"""Between CRI messages and the vocabulary of hooks; nothing of it is imported on a node without hooks."""
