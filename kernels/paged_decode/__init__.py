"""Paged decode attention: one query token per row."""
