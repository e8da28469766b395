"""sysfs to ``Machine``, and to pictures and JSON: the only reader of sysfs, from a given root.

Import from the modules: the daemon needs the reader alone.
"""
