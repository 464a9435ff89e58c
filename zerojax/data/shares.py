"""Which rows of a global batch are this process's."""

from dataclasses import dataclass

from zerojax.errors import UserError


@dataclass(frozen=True)
class Share:
    """Rows ``start`` to ``start + rows`` of every global batch.

    Attributes:
        index: the process, in [0, count).
        count: the number of processes.
        rows: rows of a process.
    """

    index: int
    count: int
    rows: int

    @property
    def start(self) -> int:
        return self.index * self.rows


def process_share(batch_size: int, process_index: int | None, process_count: int | None) -> Share:
    """This process's share of a global batch of ``batch_size`` rows; None asks JAX, which starts its backend.

    Raises:
        UserError: the batch does not divide by the processes.

    >>> process_share(8, process_index=1, process_count=2).start
    4
    """
    if process_index is None or process_count is None:
        import jax

        process_index = jax.process_index() if process_index is None else process_index
        process_count = jax.process_count() if process_count is None else process_count
    if not 0 <= process_index < process_count:
        raise UserError(f"process_index={process_index} is out of range: there are {process_count} processes")
    if batch_size < 1 or batch_size % process_count:
        raise UserError(
            f"batch_size={batch_size} does not divide by the number of processes, {process_count}: "
            f"give a positive multiple of {process_count}"
        )
    return Share(process_index, process_count, batch_size // process_count)
