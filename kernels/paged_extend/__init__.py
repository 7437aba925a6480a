"""Paged extend attention: ragged rows of query tokens, prefill and decode in one step."""
