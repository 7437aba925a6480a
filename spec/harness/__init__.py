"""What runs the specification: worlds, drivers, the shrinker, traces and pictures."""
