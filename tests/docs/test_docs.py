"""The documentation's examples run, its signatures are the code's, and its links lead somewhere."""

import contextlib
import doctest
import importlib
import inspect
import io
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax.config.deepspeed import markdown_table

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("concepts", "api", "deepspeed", "decisions", "examples", "memory")),
    "CHANGELOG.md",
]
README_NAMES = {
    "zerojax": zerojax,
    "optax": optax,
    "make_model": lambda rng: {"kernel": jax.random.normal(rng, (64, 64))},
    "loss_fn": lambda model, batch, rng: jnp.mean((batch @ model["kernel"]) ** 2),
    "ds_config": {"train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}},
    "batch": jnp.ones((16, 64)),
}


def text(page):
    return (ROOT / page).read_text(encoding="utf-8")


SLOW = [pytest.param(page, marks=pytest.mark.slow) for page in (*PAGES[2:4], "docs/memory.md")]


@pytest.mark.parametrize("page", [*PAGES[:2], *SLOW])
def test_the_examples_of_a_page_run_in_their_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = dict(README_NAMES) if page == "README.md" else {}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    failures = io.StringIO()
    for found in re.finditer(r"^```python\n(.*?)^```$", text(page), re.MULTILINE | re.DOTALL):
        source, line = found[1], text(page)[: found.start()].count("\n") + 1
        if ">>>" in source:
            example = doctest.DocTestParser().get_doctest(source, {}, page, page, line)
            example.globs = names  # one namespace for the page
            with contextlib.redirect_stdout(io.StringIO()):
                runner.run(example, out=failures.write, clear_globs=False)
        else:
            exec(compile("\n" * line + source, page, "exec"), names)
    assert not failures.getvalue(), failures.getvalue()


def test_the_table_of_deepspeed_s_keys_is_the_code_s():
    assert text("docs/deepspeed.md").endswith("-->\n" + markdown_table())


def test_every_public_name_is_described():
    described = set(re.findall(r"^### `zerojax\.(\w+)", text("docs/api.md"), re.MULTILINE))
    assert set(zerojax._HOMES) <= described


SIGNATURES = re.findall(r"^#+ `(zerojax[\w.]*)(\(.*\))`$", text("docs/api.md"), re.MULTILINE)


@pytest.mark.parametrize(("name", "signature"), SIGNATURES, ids=[name for name, _ in SIGNATURES])
def test_a_described_signature_is_the_code_s(name, signature):
    scope = {"jnp": jnp}
    exec(f"def described{signature}: pass", scope)
    assert parameters(scope["described"]) == parameters(find(name))


def parameters(called):
    # The metaclass of NNX modules hides what the constructor takes.
    has_constructor = isinstance(called, type) and "__init__" in vars(called)
    every = inspect.signature(called.__init__ if has_constructor else called).parameters.values()
    return [(p.name, p.kind, p.default) for p in every if p.name != "self"]


def find(name):
    found = zerojax
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text(page)):
        assert target.startswith("https://") or (folder / target).exists(), target
