"""``topoproxy scheduler-extender``: answers kube-scheduler's requests from the objects of the API server."""
