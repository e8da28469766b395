"""What ``topoproxy bundle`` collects for a bug report, and how it is redacted."""
