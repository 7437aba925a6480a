"""Discrete-event replay of prefill and decode nodes."""
