"""Pointing kubelet at topoproxy and back, with a journal of every change."""
