"""sysfs to ``Machine``, and back to people: the only reader of sysfs, from a root path given to it.

Import from the modules: the daemon needs the reader alone.
"""
