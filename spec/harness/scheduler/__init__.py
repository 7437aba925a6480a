"""The world of a scheduler: requests, steps, and the rules beside them."""
