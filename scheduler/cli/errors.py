"""The error that commands raise for wrong input."""


class BadInputError(Exception):
    """A file, option or request that the command cannot use; the text is one line."""
