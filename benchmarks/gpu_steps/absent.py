"""The error of what this machine does not have."""


class AbsentError(Exception):
    """A peer or a tool cannot run here; the message gives the reason. The run has not failed."""
