"""Reads a ``Machine`` from sysfs, and shows it as a picture or JSON; nothing else reads sysfs.

Import from the modules, because the daemon needs only the reader.
"""
