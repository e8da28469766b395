"""``topoproxy scheduler-extender``: what kube-scheduler asks, answered from what the API server shows."""
