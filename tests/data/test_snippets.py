import hashlib
import io
import tarfile

import numpy as np
import pytest

from zerojax.data import downloads, movie_snippets, snippets
from zerojax.data.downloads import SourceDistribution, cache_folder, fetch
from zerojax.errors import UserError


def archive(files):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a pip that reaches no index."""
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    (tmp_path / "links").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def table(cache, monkeypatch):
    """A small table in place of the real one."""
    rows = [f"{i}\t{rating}\tsentence {i}\r\n" for i, rating in enumerate([2.5, -1.0, 0.0, 0.1, -0.1] * 8, 1)]
    inner = archive({"hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt": "".join(rows).encode()})
    outer = archive({"vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz": inner})
    cache.mkdir()
    (cache / snippets.SOURCE.file).write_bytes(outer)
    monkeypatch.setattr(snippets, "SOURCE", snippets.SOURCE._replace(sha256=hashlib.sha256(outer).hexdigest()))


def test_ratings_above_zero_are_label_one(table):
    sentences, labels = movie_snippets("all")
    assert sentences == tuple(f"sentence {i}" for i in range(1, 41))
    assert labels.tolist() == [1, 0, 0, 1, 0] * 8 and labels.dtype == np.int32


def test_a_fifth_of_each_label_is_held_out(table):
    every, training, held_out = (movie_snippets(split) for split in ("all", "train", "validation"))
    assert np.bincount(held_out.labels).tolist() == [24 // 5, 16 // 5]
    assert set(training.sentences).isdisjoint(held_out.sentences)
    both = dict(zip(training.sentences + held_out.sentences, [*training.labels, *held_out.labels], strict=True))
    assert both == dict(zip(every.sentences, every.labels, strict=True))
    number = lambda sentence: int(sentence.split()[1])
    assert sorted(held_out.sentences, key=number) == list(held_out.sentences)
    # The rule, with numpy's legacy generator, whose stream is frozen (NEP 19).
    random = np.random.RandomState(0)
    chosen = [random.permutation(np.flatnonzero(every.labels == label))[:n] for label, n in ((0, 4), (1, 3))]
    assert sorted(np.concatenate(chosen) + 1) == [number(sentence) for sentence in held_out.sentences]


def test_the_real_snippets():
    try:
        every, held_out = movie_snippets("all"), movie_snippets("validation")
    except UserError as error:
        if "could not be downloaded" not in str(error):
            raise
        pytest.skip(f"needs a network, or the file in its cache: {error}")
    assert len(every.sentences) == 10_605 and every.labels.mean() == pytest.approx(0.494, abs=5e-4)
    assert every.sentences[2] == "Effective but too tepid biopic" and every.labels[:3].tolist() == [1, 1, 0]
    assert len(held_out.sentences) == 2120 and held_out.labels.sum() == 1048
    # Figures are told of this split: it is the same everywhere.
    digest = hashlib.sha256("\n".join(held_out.sentences).encode()).hexdigest()
    assert digest.startswith("8d5470025fb1b915")


def test_an_unknown_split_downloads_nothing(cache):
    with pytest.raises(UserError, match="split='test' is unknown"):
        movie_snippets("test")
    assert not cache.exists()


def test_without_a_network_the_fault_is_told(cache):
    with pytest.raises(UserError) as told:
        movie_snippets()
    message = str(told.value)
    assert "vaderSentiment==3.3.2 could not be downloaded: Could not find a version" in message
    assert f"or the archive itself as {cache}/vaderSentiment-3.3.2.tar.gz" in message and "\n" not in message
    assert list(cache.iterdir()) == []


def test_another_file_of_that_name_is_refused_before_its_setup_runs(cache, tmp_path):
    ran = tmp_path / "ran"
    setup = f"from pathlib import Path\nPath({str(ran)!r}).write_text('')\n"
    false = archive({"vaderSentiment-3.3.2/setup.py": setup.encode()})
    (tmp_path / "links" / "vaderSentiment-3.3.2.tar.gz").write_bytes(false)
    with pytest.raises(UserError, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
        movie_snippets()
    assert not ran.exists() and list(cache.iterdir()) == []


def test_a_damaged_file_in_the_cache_is_refused(cache):
    cache.mkdir()
    (cache / "x.tar.gz").write_bytes(b"half of it")
    wanted = SourceDistribution("x==1", "x.tar.gz", "ab" * 32)
    with pytest.raises(
        UserError, match=f"x.tar.gz: sha256 is {hashlib.sha256(b'half of it').hexdigest()}; accepted: ab"
    ):
        fetch(wanted)


def test_a_cache_that_cannot_be_written_is_named(cache):
    cache.write_text("a file")
    with pytest.raises(UserError, match="cache/vaderSentiment-3.3.2.tar.gz: .*named by ZEROJAX_CACHE"):
        fetch(snippets.SOURCE)


def test_where_the_cache_is(monkeypatch, tmp_path):
    for name in ("ZEROJAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "zerojax"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "zerojax"
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "own"))
    assert downloads.cache_folder() == tmp_path / "own"
