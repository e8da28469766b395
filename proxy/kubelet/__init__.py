"""What kubelet knows: its checkpoints."""
