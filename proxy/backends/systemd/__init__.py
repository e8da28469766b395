"""systemd as we call it: D-Bus, and the properties of units."""
