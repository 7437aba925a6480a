"""The one error a command raises for what its user typed or supplied."""


class BadInputError(Exception):
    """A file, option or request that the command cannot work with; the text is one line."""
