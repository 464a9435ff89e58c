"""The tokenizer beside a model's weights."""

import os
from pathlib import Path
from typing import Any

from zerojax.data.requirements import require_module
from zerojax.errors import UserError


def read_tokenizer(path: str | os.PathLike[str]) -> Any:
    """The ``tokenizers.Tokenizer`` of a ``tokenizer.json``, without the padding and truncation that it may ask for.

    Args:
        path: the file, or the directory it is in.

    Raises:
        UserError: the file is absent or no tokenizer, or the package ``tokenizers`` is missing.
    """
    path = Path(path)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"tokenizer {path}: no such file; accepted: a tokenizer.json, or a directory with one")
    library: Any = require_module("tokenizers", "pip install tokenizers")
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"tokenizer {path}: not a tokenizer of the tokenizers library: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
