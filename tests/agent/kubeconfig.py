"""The parts of a kubeconfig for tests: a server at which nothing listens, and a user without credentials."""

CLUSTERS = "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\n"
USERS = "users: [{name: u, user: {}}]\n"
CONTEXT = "contexts: [{name: x, context: {cluster: c, user: u}}]\ncurrent-context: x\n"
