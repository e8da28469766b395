"""What systemd says of containers' units."""
