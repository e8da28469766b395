"""A client of systemd: D-Bus, and the properties of units."""
