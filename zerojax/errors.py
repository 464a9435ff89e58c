"""What goes wrong outside of the library: the user's input, and the machine a run is on."""


class UserError(ValueError):
    """Wrong input: one line that names the thing, the value and what is accepted."""


class RunError(RuntimeError):
    """A run cannot go on, through no fault of its input (a full disk, damaged files): one line that says why."""
