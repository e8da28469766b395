"""From sysfs to a Machine: the only reader of sysfs."""
