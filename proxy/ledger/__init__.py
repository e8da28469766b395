"""Durable state and journal."""
