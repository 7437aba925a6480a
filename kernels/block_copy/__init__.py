"""Block copies: within a pool, out of it into contiguous staging memory, and back."""
