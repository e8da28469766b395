"""Makes kubelet use topoproxy as its runtime endpoint and undoes it, with a journal of every change."""
