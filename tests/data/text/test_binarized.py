"""Folders made by fairseq-preprocess, by the real one: what goes in comes out."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from gpipe._compat.fairseq import import_fairseq
from gpipe.data import ParallelCorpus, Tokenizer, TranslationLoader, open_corpus, split_of
from gpipe.data.text.multilingual_text import read_embedded
from tests.data.text.small_text import embedded_tokenizer, ids, write_parallel

# Each argument is a command line of fairseq-preprocess; one process for all of them, as importing it takes seconds.
PREPROCESS = """
import sys
from gpipe._compat.fairseq import import_fairseq
for arguments in sys.argv[1:]:
    sys.argv[1:] = arguments.split()
    import_fairseq("fairseq_cli.preprocess").cli_main()
"""
TOKENIZER = embedded_tokenizer()
LANGUAGES = ("de", "zu")


def lines(language: str, split: str) -> list[tuple[str, str]]:
    return [(pair.source, pair.target) for pair in read_embedded()[language] if split_of(pair.target) == split][:40]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two languages of the embedded corpus, binarised into one folder with one dictionary."""
    text, out = tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("binarized")
    pieces = TOKENIZER.pieces()
    TOKENIZER.write_dictionary(text / "dict.txt")
    commands = []
    for language in LANGUAGES:
        for split in ("train", "valid", "test"):
            cut = [
                tuple(" ".join(pieces[n] for n in TOKENIZER.encode(side)) for side in p) for p in lines(language, split)
            ]
            write_parallel(text, split, language, cut)
        texts = " ".join(f"--{split}pref {text}/{split}.{language}-en" for split in ("train", "valid", "test"))
        dictionary = f"--srcdict {text}/dict.txt --tgtdict {text}/dict.txt"
        commands.append(f"--source-lang {language} --target-lang en {dictionary} {texts} --destdir {out}")
    subprocess.run([sys.executable, "-c", PREPROCESS, *commands], check=True, capture_output=True, text=True)
    return out


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """Return a copy to damage."""
    return copytree(folder, tmp_path / "copied")


def open_binarized(root: Path, split: str = "train", **settings) -> ParallelCorpus:
    settings = {"tokenizer": TOKENIZER, "languages": None, "max_tokens": 999, **settings}
    return open_corpus("binarized", split, root, **settings)


def refused(root: Path, pattern: str, **settings) -> None:
    with pytest.raises(ValueError, match=pattern) as caught:
        open_binarized(root, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_what_fairseq_binarised_reads_back_to_the_same_ids(folder: Path, split: str) -> None:
    corpus = open_binarized(folder, split)
    assert corpus.languages == LANGUAGES and corpus.vocabulary_size == 4000 and corpus.warnings() == []
    for language in LANGUAGES:
        pairs = lines(language, split)
        assert len(corpus.pairs(language)) == len(pairs)
        for index, pair in enumerate(pairs):
            for found, text in zip(corpus.pair(language, index), pair, strict=True):
                assert ids(found) == [*TOKENIZER.encode(text), 2]


def test_the_ids_are_those_that_fairseqs_data_set_gives_and_stay_on_the_disk(folder: Path) -> None:
    sources = open_binarized(folder).pairs("de").sources
    theirs = import_fairseq("fairseq.data.indexed_dataset").MMapIndexedDataset(str(folder / "train.de-en.de"))
    assert all(ids(sources[index]) == theirs[index].tolist() for index in range(len(theirs)))
    assert not sources.tokens.flags.owndata and sources.tokens.dtype == np.uint16


def test_the_cache_has_where_the_sentences_lie_and_every_id_is_checked_once(
    copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copied / "token_cache", ignore_errors=True)
    whole = open_binarized(copied, languages=["de"])
    assert capfd.readouterr().err == f"reading train.de-en into {copied / 'token_cache'}, once\n"
    (folder,) = (copied / "token_cache").glob("train.de-en.*")
    kinds = {path.name for path in folder.iterdir()}
    assert kinds == {
        "description.json",
        *(f"{side}.{kind}" for side in ("sources", "targets") for kind in ("starts", "lengths")),
    }
    again = open_binarized(copied, languages=["de"])
    assert capfd.readouterr().err == "" and len(again) == len(whole) == 40
    path = copied / "train.de-en.en.bin"
    times = path.stat()
    tokens = np.memmap(path, np.uint16, "r+")
    tokens[0] = 4000  # behind the cache's back
    tokens.flush()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(
        ValueError, match=r"token cache .*train\.de-en\.\w+ is damaged \(it has an id that is not below"
    ):
        open_binarized(copied, languages=["de"]).pair("de", 0)


def test_mini_batches_are_those_of_the_same_text(folder: Path, tmp_path: Path) -> None:
    for language in LANGUAGES:
        for split in ("train", "valid", "test"):
            write_parallel(tmp_path, split, language, lines(language, split))
    settings = {"tokenizer": TOKENIZER, "languages": None, "max_tokens": 120}
    roots = {"parallel_text": tmp_path, "binarized": folder}
    corpora = [open_corpus(name, "train", root, **settings) for name, root in roots.items()]
    said, as_well = ([warning.partition(",")[0] for warning in corpus.warnings()] for corpus in corpora)
    assert said == as_well != []
    for shuffle in (True, False):
        both = [TranslationLoader(corpus, 300, 3, shuffle=shuffle) for corpus in corpora]
        assert len(both[0]) == len(both[1]) > 5
        for (inputs, targets), (other_inputs, other_targets) in zip(*both, strict=True):
            pairs = [*zip(inputs, other_inputs, strict=True), *((targets[key], other_targets[key]) for key in targets)]
            assert all(ours.equal(theirs) for ours, theirs in pairs)


def test_an_id_outside_the_vocabulary_is_refused_with_its_place(copied: Path) -> None:
    path = copied / "train.zu-en.en.bin"
    first = len(TOKENIZER.encode(lines("zu", "train")[0][1])) + 1
    tokens = np.memmap(path, np.uint16, "r+")
    tokens[first] = 4000
    tokens.flush()
    refused(
        copied, rf"{path} has the id 4000 in sentence 2, expected ids below the dictionary's 4,000: binarise it with"
    )
    assert len(open_binarized(copied, languages=["de"])) == 40


def test_two_vocabularies_are_refused(copied: Path) -> None:
    with (copied / "dict.zu.txt").open("a") as stream:
        stream.write("new 1\n")
    refused(
        copied, r"dict.zu.txt differs from dict.en.txt, but one vocabulary must serve both sides and all languages: bin"
    )
    (copied / "dict.zu.txt").unlink()
    refused(copied, r"dict.zu.txt does not exist: fairseq-preprocess writes it beside the binarised text")


def test_a_tokenizer_of_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    other = Tokenizer.train([pair.target for pair in read_embedded()["de"]], 400, tmp_path / "other.model")
    refused(
        folder, r"the tokenizer .*other.model has other pieces than .*dict.en.txt: binarise with the", tokenizer=other
    )
    assert len(open_binarized(folder, tokenizer=None)) == 80


def test_a_dictionary_with_more_symbols_than_the_tokenizer_has_pieces_is_refused(copied: Path) -> None:
    """A model could choose one in a translation, and no text stands for it."""
    for path in copied.glob("dict.*.txt"):
        path.write_text(path.read_text("utf-8") + "madeupword0000 0\n", "utf-8")
    refused(copied, r"the tokenizer .* has other pieces than .*dict.en.txt: binarise with the")
    assert open_binarized(copied, tokenizer=None).vocabulary_size == TOKENIZER.vocabulary_size + 1


def test_damaged_and_missing_files_are_refused(copied: Path) -> None:
    path = copied / "train.de-en.de.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    refused(copied, rf"{path} has {len(whole) - 2:,} bytes, which its index contradicts: binarise it again")
    path.write_bytes(whole[:-2] + b"\x09\x00")
    refused(copied, r"train.de-en.de.bin does not end sentence 40 with id 2: fairseq-preprocess appends it")
    path.unlink()
    refused(copied, r"train.de-en.de.bin does not exist: binarise it again, with --dataset-impl mmap")
    path.write_bytes(whole)
    for ending in ("bin", "idx"):
        (copied / f"train.de-en.de.{ending}").write_bytes((copied / f"test.zu-en.zu.{ending}").read_bytes())
    refused(copied, r"train.de-en has 6 sentences in de and 40 in en: binarise it again")
    (copied / "train.de-en.de.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(40))
    refused(copied, r"train.de-en.de.idx is not an index in fairseq's mmap format: binarise with --dataset-impl mmap")


def test_long_sentences_are_skipped_and_counted(folder: Path) -> None:
    longest = max(len(TOKENIZER.encode(side)) + 1 for pair in lines("de", "train") for side in pair)
    corpus = open_binarized(folder, languages=["de"], max_tokens=longest - 1)
    (warning,) = corpus.warnings()
    assert warning.startswith(
        f"skipped {40 - len(corpus)} pairs longer than {longest - 1} tokens (data.max_tokens), the "
    )
    assert f"{folder / 'train.de-en'}:" in warning
