"""The real run: a scaled-down slice of the trace through the real engine and a tiny model.

`run_real` runs it with and without caches in a tight pool, and checks that the tokens are equal.
"""
