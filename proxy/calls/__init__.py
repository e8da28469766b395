"""What is decided on calls of kubelet, whichever protocol they come in: the middle below all front ends."""
