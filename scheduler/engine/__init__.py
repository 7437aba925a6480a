"""The engine: a scheduler and a model, run in steps."""
