"""The parts that a data set is divided into."""

from zerojax.data.texts import SPLITS
from zerojax.errors import UserError


def check_split(split: str) -> None:
    """
    Raises:
        UserError: ``split`` is no part of a data set.
    """
    if split not in SPLITS:
        raise UserError(f"split={split!r} is unknown: give one of {', '.join(SPLITS)}")
