"""What the specification asks of a manager or scheduler, and the target behind an adapter."""
