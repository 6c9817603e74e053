"""The token cache: made once, by one process, complete or not at all; and what is damaged is refused by name."""

import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpipe.data import LanguagePairs, ParallelCorpus, Tokenizer, TranslationLoader, open_corpus
from gpipe.data.text import parallel_text, token_cache
from gpipe.data.text.multilingual_text import read_embedded
from gpipe.data.text.sentences import Sentences
from tests.data.text.small_text import embedded_tokenizer, ids, write_parallel

TOKENIZER = embedded_tokenizer()
PAIRS = [(f"Satz Nummer {number}", f"sentence number {number}" * (1 + number % 3)) for number in range(40)]
# Opens the corpus of a folder when it is told to, and prints the ids of one language.
OPEN = """
import sys
from pathlib import Path
from gpipe.data import open_corpus, open_tokenizer
tokenizer = open_tokenizer("parallel_text", None)
print("ready", flush=True)
corpus = open_corpus("parallel_text", "train", sys.argv[1], tokenizer=tokenizer, languages=["de"], max_tokens=50)
print([corpus.pair("de", index)[1].tolist() for index in range(len(corpus.pairs("de")))])
"""
# The same, but it is killed after the first block of lines.
KILLED = """
import os, signal, sys
from gpipe.data.text import parallel_text
parallel_text._BLOCK = 10
encode, blocks = parallel_text.TextEncoder.encode, []
parallel_text.TextEncoder.encode = lambda *args: (
    os.kill(os.getpid(), signal.SIGKILL) if blocks else blocks.append(0) or encode(*args)
)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "valid", "test"):
        write_parallel(tmp_path, split, "de", PAIRS)
    return tmp_path


def open_text(root: Path, **settings) -> ParallelCorpus:
    settings = {"tokenizer": TOKENIZER, "languages": ["de"], "max_tokens": 50, **settings}
    return open_corpus("parallel_text", "train", root, **settings)


def targets(corpus: ParallelCorpus) -> list[list[int]]:
    return [ids(corpus.pair("de", index)[1]) for index in range(len(corpus))]


def expected(pairs: list[tuple[str, str]] = PAIRS) -> list[list[int]]:
    return [[*TOKENIZER.encode(target), 2] for _, target in pairs]


def caches(root: Path) -> list[Path]:
    """Return all that lies in the cache but its lock."""
    return sorted(path for path in (root / "token_cache").iterdir() if path.name != ".lock")


def start(root: Path, before: str = "") -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", before + OPEN, str(root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_text_is_tokenised_once_and_its_ids_stay_on_the_disk(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert targets(open_text(root)) == expected()
    (folder,) = caches(root)
    assert capfd.readouterr().err == f"reading train.de-en into {root / 'token_cache'}, once\n"
    path = root / "train.de-en.en"
    times = path.stat()
    path.write_bytes(bytes(times.st_size))  # other text, which looks the same from outside
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    corpus = open_text(root)
    assert targets(corpus) == expected() and capfd.readouterr().err == ""
    for sentences in (corpus.pairs("de").sources, corpus.pairs("de").targets):
        for array in (sentences.tokens, sentences.starts, sentences.lengths):
            assert not array.flags.owndata and not array.flags.writeable
    assert folder.name.startswith("train.de-en.") and folder.stat().st_mode & 0o700 == 0o700


def test_a_loader_reads_the_same_mini_batches_from_the_cache_and_from_memory(root: Path) -> None:
    corpus = open_text(root)
    sides = [
        [list(array[:-1]) for array in each] for each in zip(*(corpus.pair("de", i) for i in range(40)), strict=True)
    ]
    memory = ParallelCorpus({"de": _packed(*sides)}, TOKENIZER.vocabulary_size)
    for shuffle in (True, False):
        both = [TranslationLoader(each, 200, 1, shuffle=shuffle) for each in (corpus, memory)]
        for (inputs, found), (other_inputs, other) in zip(*both, strict=True):
            assert all(one.equal(another) for one, another in zip(inputs, other_inputs, strict=True))
            assert all(found[key].equal(other[key]) for key in found)


def _packed(sources: list[list[int]], english: list[list[int]]) -> LanguagePairs:
    return LanguagePairs(Sentences.pack(sources, 4000), Sentences.pack(english, 4000))


@given(piece=st.integers(1, 8), rows=st.lists(st.integers(0, len(PAIRS) - 1)))
def test_the_disk_is_asked_for_all_that_a_shard_reads_and_for_little_else(whole: Path, piece: int, rows) -> None:
    asked: dict[int, set[int]] = {}
    pairs = open_text(whole).pairs("de")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "_PIECE", piece)
        patch.setattr(
            token_cache._MappedFile,
            "prefetch",
            lambda file, first, end: asked.setdefault(id(file.numbers), set()).update(range(first, end)),
        )
        pairs.prefetch(np.array(rows, np.int64))
    pieces = {row // piece for row in rows}
    some = {row for row in range(len(PAIRS)) if row // piece in pieces}
    for sentences in (pairs.sources, pairs.targets):
        firsts, lengths = sentences.starts.tolist(), sentences.lengths.tolist()
        inside = {token for row in some for token in range(firsts[row], firsts[row] + lengths[row])}
        arrays = (sentences.starts, sentences.lengths, sentences.tokens)
        assert [asked.get(id(array), set()) for array in arrays] == [some, some, inside]


def test_what_is_asked_for_beyond_the_end_of_a_file_is_left_out(tmp_path: Path) -> None:
    numbers = np.arange(3000, dtype=np.int64)
    numbers.tofile(tmp_path / "numbers")
    mapped = token_cache._MappedFile(tmp_path / "numbers", numbers.dtype)
    for first, end in ((0, 3000), (-5, 10), (2999, 1 << 70), (3000, 3001), (1 << 70, 1 << 71), (20, 10)):
        mapped.prefetch(first, end)
    assert (mapped.numbers == numbers).all()


def test_what_the_ids_depend_on_makes_another_cache(root: Path, tmp_path: Path) -> None:
    open_text(root)
    assert len(caches(root)) == 1
    assert len(targets(open_text(root, max_tokens=12))) < 40
    assert len(caches(root)) == 2
    changed = [*PAIRS[:-1], ("Satz Nummer XX", PAIRS[-1][1])]  # as long as before
    before = (root / "train.de-en.de").stat()
    write_parallel(root, "train", "de", changed)
    os.utime(root / "train.de-en.de", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    corpus = open_text(root)
    assert TOKENIZER.decode(ids(corpus.pair("de", 39)[0])) == "Satz Nummer XX"
    assert len(caches(root)) == 3
    other = Tokenizer.train([pair.target for pair in read_embedded()["de"]], 400, tmp_path / "other.model")
    assert open_text(root, tokenizer=other).vocabulary_size == 400
    assert len(caches(root)) == 4
    assert targets(open_text(root, max_tokens=50)) == expected(changed)
    assert len(caches(root)) == 4


def test_warnings_come_from_the_cache_too(root: Path) -> None:
    write_parallel(root, "train", "de", [PAIRS[0], ("", "two"), ("wort " * 60, "three")])
    first, again = open_text(root).warnings(), open_text(root).warnings()
    path = root / "train.de-en.de"
    assert (
        first
        == again
        == [
            f"skipped 1 pairs with an empty line, the first at {path}:2",
            f"skipped 1 pairs longer than 50 tokens (data.max_tokens), the first at {path}:3",
        ]
    )


def test_of_two_processes_one_tokenises_and_the_other_waits(root: Path) -> None:
    (root / "token_cache").mkdir()
    with (root / "token_cache" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        both = [start(root) for _ in range(2)]
        for process in both:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert [process.poll() for process in both] == [None, None]
        assert caches(root) == []
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [json.loads(out) for out, _ in said] == [expected()] * 2
    assert sorted(error for _, error in said) == ["", f"reading train.de-en into {root / 'token_cache'}, once\n"]
    assert len(caches(root)) == 1


def test_a_process_that_is_killed_leaves_nothing_that_counts(root: Path) -> None:
    process = start(root, KILLED)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    (left,) = caches(root)
    assert re.fullmatch(r"\.train\.de-en\.[0-9a-f]{16}\.partial", left.name)
    assert (left / "targets.tokens").exists()
    assert targets(open_text(root)) == expected()
    assert [path.name for path in caches(root)] == [left.name.removeprefix(".").removesuffix(".partial")]


def test_text_that_is_refused_leaves_nothing(root: Path) -> None:
    path = root / "train.de-en.de"
    path.write_bytes(path.read_bytes().replace(b"Nummer 39", b"Nummer \xff9"))
    with pytest.raises(ValueError, match=rf"^{path}:40 is not UTF-8"):
        open_text(root)
    assert caches(root) == []
    write_parallel(root, "train", "de", PAIRS)
    assert targets(open_text(root)) == expected()


def test_text_that_cannot_be_read_is_not_taken_for_a_cache_that_cannot_be_written(root: Path) -> None:
    path = root / "train.de-en.de"
    path.unlink()
    path.symlink_to("/proc/self/mem")  # a file whose first byte cannot be read, not even by root
    with pytest.raises(ValueError, match=rf"^{path} cannot be read \(Input/output error\): make it readable, or copy"):
        open_text(root)
    assert caches(root) == []


def test_text_that_changes_while_it_is_read_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / "train.de-en.de"
    encode = parallel_text.TextEncoder.encode
    with monkeypatch.context() as patch:
        patch.setattr(parallel_text.TextEncoder, "encode", lambda *args: (os.utime(path), encode(*args))[1])
        with pytest.raises(ValueError, match=rf"^{path} changed while it was read: start again when it is complete$"):
            open_text(root)
    assert caches(root) == []
    assert targets(open_text(root)) == expected()


def test_a_full_disk_is_one_sentence_and_leaves_nothing(root: Path) -> None:
    write_parallel(root, "train", "de", PAIRS * 500)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(
            ValueError, match=rf"^the token cache {root / 'token_cache'} cannot be written \(.*\): free"
        ):
            open_text(root)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caches(root) == []
    assert len(open_text(root)) == 20_000


def test_a_low_limit_of_open_files_is_raised(root: Path) -> None:
    languages = [f"l{number}" for number in range(5)]
    for language in languages:
        write_parallel(root, "train", language, PAIRS)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = sum(1 for _ in Path("/proc/self/fd").iterdir())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 20, limits[1]))  # 30 files of the cache stay open
        corpus = open_text(root, languages=languages)
        assert all(ids(corpus.pair(language, 0)[1]) == expected()[0] for language in languages)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_cache_may_lie_elsewhere(root: Path, tmp_path: Path) -> None:
    (root / "token_cache").write_text("in the way, as a folder that cannot be written is")
    sentence = (
        rf"^the token cache {root / 'token_cache'} cannot be written \(.*\): free space there, or set data.cache to"
    )
    with pytest.raises(ValueError, match=sentence):
        open_text(root)
    assert targets(open_text(root, cache=tmp_path / "elsewhere")) == expected()
    assert (tmp_path / "elsewhere" / ".lock").exists()
    with pytest.raises(ValueError, match=r"data.cache is elsewhere, but the corpus multilingual_embedded is small and"):
        open_corpus(
            "multilingual_embedded", "valid", tokenizer=TOKENIZER, languages=["de"], max_tokens=50, cache="elsewhere"
        )


def test_a_line_without_end_does_not_fill_the_memory(root: Path) -> None:
    path = root / "train.de-en.de"
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + (1 << 32))  # a hole of 4 GiB
    with pytest.raises(ValueError, match=rf"^{path}:41 is longer than 1 MiB: write one sentence per line$"):
        open_text(root)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("text")
    for split in ("train", "valid", "test"):
        write_parallel(root, split, "de", PAIRS)
    open_text(root)
    return root


def refused(root: Path, reason: str) -> None:
    (folder,) = caches(root)
    sentence = (
        rf"the token cache {folder} is damaged \({reason}\): delete that folder, and the next run creates it again"
    )
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        list(TranslationLoader(open_text(root), 200, 1, shuffle=False))
    shutil.rmtree(folder)
    assert targets(open_text(root)) == expected()


@pytest.mark.parametrize("name", [f"{side}.{kind}" for side in ("sources", "targets") for kind in ("tokens", "starts")])
def test_a_file_that_is_too_short_or_missing_is_refused_by_name(root: Path, name: str) -> None:
    for length in (10, None):
        open_text(root)
        path = caches(root)[0] / name
        size = path.stat().st_size
        if length is None:
            path.unlink()
        else:
            os.truncate(path, length)
        refused(root, f"{name} has {length} bytes, expected {size}")


@pytest.mark.parametrize(
    ("name", "kind", "value", "reason"),
    [
        ("targets.tokens", np.uint16, 4000, "it has an id that is not below 4,000"),
        ("sources.starts", np.int64, 1 << 40, "it has a sentence outside of its tokens"),
        ("sources.lengths", np.int32, 0, "it has a sentence that is empty or too long"),
        ("targets.lengths", np.int32, 1 << 30, "it has a sentence that is empty or too long"),
    ],
)
def test_a_number_that_cannot_be_is_refused(root: Path, name: str, kind: type, value: int, reason: str) -> None:
    open_text(root)
    array = np.memmap(caches(root)[0] / name, kind, "r+")
    array[7] = value
    array.flush()
    refused(root, reason)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda found: found | {"key": {**found["key"], "format": 0}}, "it was made from other files or settings"),
        (lambda found: found | {"num_tokens": "many"}, r"its description\.json is invalid: num_tokens: .+"),
        (lambda found: found | {"longest": -1}, r"its description\.json is invalid: longest: .+"),
        (lambda found: found | {"longest": 51}, "its description.json contradicts itself"),
        (lambda found: found | {"num_tokens": 10**300}, "its description.json contradicts itself"),
        (lambda found: found | {"skipped": [["long"]]}, r"its description\.json is invalid: skipped: .+"),
        (lambda found: [found], r"its description\.json is invalid: .+"),
    ],
)
def test_a_description_that_is_wrong_is_refused(root: Path, change, reason: str) -> None:
    open_text(root)
    path = caches(root)[0] / "description.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    refused(root, reason)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_cache_with_other_bytes_is_read_or_refused_by_name(whole: Path, data: st.DataObject) -> None:
    (folder,) = caches(whole)
    path = folder / data.draw(st.sampled_from(sorted(each.name for each in folder.iterdir())))
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    other = data.draw(st.binary(min_size=1, max_size=9))
    path.write_bytes((content[:place] + other + content[place + len(other) :])[: len(content)])
    message = f"{folder}"
    try:
        for shuffle in (True, False):
            for (source, _), found in TranslationLoader(open_text(whole), 200, 1, shuffle=shuffle):
                assert 0 <= min(source.min(), found["tokens"].min()) <= max(source.max(), found["tokens"].max()) < 4000
    except ValueError as error:
        message = str(error)
    path.write_bytes(content)
    assert str(folder) in message and "\n" not in message
    assert targets(open_text(whole)) == expected()
