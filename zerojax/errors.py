"""The error that says the user's input is wrong."""


class UserError(ValueError):
    """Wrong input: one line that names the thing, the value and what would be accepted."""
