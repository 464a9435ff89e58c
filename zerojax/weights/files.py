"""Files of safetensors: opened lazily, written as a stream of tensors."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from zerojax.data.requirements import require_module
from zerojax.errors import UserError, shown

SUFFIX = ".safetensors"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
METADATA = {"format": "pt"}  # without it PyTorch's libraries refuse a file

# The floating types of the format: https://huggingface.co/docs/safetensors, "Format".
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Spec(NamedTuple):
    """A tensor's shape, and its dtype as the format writes it."""

    shape: tuple[int, ...]
    dtype: str


class TensorFiles:
    """The tensors of one file, or of a directory's file or files, read one at a time.

    Attributes:
        path: the file or directory.
        specs: shape and dtype of each tensor, by name.

    Raises:
        UserError: there is no such file, or it is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        library: Any = require_module("safetensors", "pip install safetensors")
        self._files: dict[str, Any] = {}
        self.specs: dict[str, Spec] = {}
        for file in _files_at(self.path):
            try:
                opened = library.safe_open(file, framework="numpy")
            except (OSError, library.SafetensorError) as error:
                raise UserError(f"weights {file}: not a safetensors file: {error}") from error
            for name in opened.keys():  # noqa: SIM118 - no mapping
                entry = opened.get_slice(name)
                self._files[name] = opened
                self.specs[name] = Spec(tuple(entry.get_shape()), entry.get_dtype())

    def read(self, name: str) -> np.ndarray:
        return self._files[name].get_tensor(name)


def _files_at(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / INDEX).is_file():
        return _shards(path / INDEX)
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    what = f"no {SINGLE} and no {INDEX} in it" if path.is_dir() else "no such file or directory"
    raise UserError(f"weights {path}: {what}; accepted: a {SUFFIX} file, or a directory with {SINGLE} or {INDEX}")


def _shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"weights {index}: not an index of safetensors files: {shown(error)}") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise UserError(f"weights {index}: the index names {', '.join(missing)}, which the directory does not have")
    return [index.parent / name for name in names]


class Shard(NamedTuple):
    """A file to be written: its name, and its tensors in their order."""

    file: str
    specs: Mapping[str, Spec]


def plan_shards(specs: Mapping[str, Spec], shard_bytes: int) -> list[Shard]:
    """Files of at most ``shard_bytes`` of tensors, where no single tensor is larger; Hugging Face's names.

    >>> [shard.file for shard in plan_shards({"a": Spec((4,), "F32"), "b": Spec((4,), "F32")}, 16)]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    groups: list[dict[str, Spec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if groups[-1] and size + nbytes(spec) > shard_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = spec
        size += nbytes(spec)
    if len(groups) == 1:
        return [Shard(SINGLE, groups[0])]
    return [Shard(f"model-{i:05}-of-{len(groups):05}{SUFFIX}", group) for i, group in enumerate(groups, 1)]


def index_of(shards: Sequence[Shard]) -> str:
    """The text of the index file."""
    total = sum(nbytes(spec) for shard in shards for spec in shard.specs.values())
    names = {name: shard.file for shard in shards for name in shard.specs}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}, indent=2) + "\n"


class TensorWriter:
    """Writes a file whose tensors come one after another, so that they need never be in memory together.

    The library of the format wants them all at once. The file is eight bytes with the header's length, the header in
    JSON, and the tensors' bytes in the order of the header.
    """

    def __init__(self, path: Path, specs: Mapping[str, Spec]) -> None:
        self._specs = specs
        self._order = iter(specs)
        self._stream = path.open("wb")
        with _closing_on_error(self._stream):
            header = json.dumps(_header(specs), separators=(",", ":")).encode()
            header += b" " * (-len(header) % 8)  # the tensors begin at a multiple of eight
            self._stream.write(len(header).to_bytes(8, "little") + header)

    def write(self, name: str, tensor: np.ndarray) -> None:
        """The next tensor of ``specs``."""
        spec = self._specs[name]
        assert name == next(self._order) and spec == Spec(tensor.shape, dtype_name(tensor.dtype))
        self._stream.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)

    def close(self) -> None:
        with contextlib.closing(self._stream):
            self._stream.flush()
            os.fsync(self._stream.fileno())


def dtype_name(dtype: np.dtype) -> str:
    """The format's name of a dtype."""
    return _NAMES[np.dtype(dtype).name]


def nbytes(spec: Spec) -> int:
    return int(np.prod(spec.shape, dtype=np.int64)) * jnp.dtype(DTYPES[spec.dtype]).itemsize


def _header(specs: Mapping[str, Spec]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": METADATA}
    offset = 0
    for name, spec in specs.items():
        end = offset + nbytes(spec)
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    return header


@contextlib.contextmanager
def _closing_on_error(stream: Any) -> Iterator[None]:
    try:
        yield
    except BaseException:
        stream.close()
        raise
