"""A scaled slice of the trace through the real engine and a tiny model."""
