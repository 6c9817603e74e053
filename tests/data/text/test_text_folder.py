"""A folder of plain text becomes sequences of tokens, of which none is lost, repeated or in both splits."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpipe.data import DataMissing, check_data, open_text_folder, open_text_tokenizer
from gpipe.data.text import text_folder
from gpipe.data.text.tokenizer import END
from tests.support.process_pool import ProcessPool

TOKENIZER = open_text_tokenizer(None)
LINES = [f"Line {number} says something of {number * 7} things." for number in range(200)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("\n".join(LINES[:120]) + "\n\n")
    (tmp_path / "deep" / "b.txt").write_text("\n".join(LINES[120:]))
    (tmp_path / "notes.md").write_text("not read")
    return tmp_path


def tokens_of(lines: list[str]) -> list[int]:
    return [number for line in TOKENIZER.encode_lines(lines) for number in (*line, END)]


def read(root: Path, split: str, length: int = 16, share: float | None = 0.25) -> list[list[int]]:
    found = open_text_folder(root, split, TOKENIZER, length, share)
    return [found.sequence(index).tolist() for index in range(len(found))]


def test_the_sequences_are_the_text_and_each_has_one_token_more_to_predict(root: Path) -> None:
    first, second = tokens_of(LINES[:120]), tokens_of(LINES[120:])
    num_first, num_both = round(0.25 * len(first)), round(0.25 * len(first + second))
    expected = [
        (tokens[: len(tokens) - num], tokens[len(tokens) - num :])
        for tokens, num in ((first, num_first), (second, num_both - num_first))
    ]
    for split, position in (("train", 0), ("test", 1)):
        whole = [number for parts in expected for number in parts[position]]
        sequences = read(root, split)
        assert len(sequences) == (len(whole) - 1) // 16
        assert sequences == [whole[start : start + 17] for start in range(0, 16 * len(sequences), 16)]


def test_many_files_that_are_too_short_for_a_share_of_each_give_the_share_of_all(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(100)]
    for number, word in enumerate(words):
        (tmp_path / f"{number:03}.txt").write_text(word)
    whole = [tokens_of([word]) for word in words]
    assert max(round(0.1 * len(tokens)) for tokens in whole) == 0
    tests = open_text_folder(tmp_path, "test", TOKENIZER, 1, 0.1)
    train = open_text_folder(tmp_path, "train", TOKENIZER, 1, 0.1)
    total = sum(map(len, whole))
    assert (len(tests) + 1, len(train) + 1) == (round(0.1 * total), total - round(0.1 * total))


def test_hidden_files_and_a_byte_order_mark_are_no_text(root: Path) -> None:
    expected = read(root, "train")
    text = (root / "a.txt").read_text()
    (root / "a.txt").write_text(text, encoding="utf-8-sig")
    (root / ".ipynb_checkpoints").mkdir()
    for name in (".ipynb_checkpoints/a-checkpoint.txt", "._b.txt"):
        (root / name).write_text("an editor's copy")
    assert read(root, "train") == expected
    (root / "deep" / "b.txt").rename(root / "deep" / "b.TXT")
    assert read(root, "train") == expected


def test_links_are_followed_and_one_that_leads_back_is_refused(root: Path, tmp_path_factory: Any) -> None:
    alone = tmp_path_factory.mktemp("elsewhere")
    (root / "deep").rename(alone / "deep")
    whole = read(root, "train")
    (root / "linked").symlink_to(alone / "deep")
    assert len(read(root, "train")) > len(whole)
    (alone / "deep" / "loop").symlink_to(root)
    with pytest.raises(ValueError, match=r"loop leads to .* again, whose files would count more than once; remove the"):
        read(root, "train")


def test_a_share_of_train_is_taken_where_there_is_such_a_folder(root: Path) -> None:
    expected = read(root, "train")
    (root / "train").mkdir()
    for name in ("a.txt", "deep"):
        (root / name).rename(root / "train" / name)
    (root / "test").mkdir()
    (root / "test" / "held_out.txt").write_text("\n".join(LINES))
    assert read(root, "train") == expected


@pytest.mark.parametrize("name", ["text_folder", "image_folder"])
def test_an_empty_root_is_not_the_current_folder(name: str) -> None:
    with pytest.raises(DataMissing, match=r"Looked for: the folder data.root, which is not set"):
        check_data(name, "")


def test_train_and_val_are_read_where_they_are(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    both = tmp_path_factory.mktemp("both")
    for name, lines in (("train", LINES[:150]), ("val", LINES[150:])):
        (both / name).mkdir()
        (both / name / "text.txt").write_text("\n".join(lines))
    assert read(both, "train", share=None)[0] == tokens_of(LINES[:150])[:17]
    assert read(both, "test", share=None)[0] == tokens_of(LINES[150:])[:17]
    with pytest.raises(ValueError, match=r"data.validation_share is 0.25, but .*val has texts for evaluation"):
        read(both, "train")
    with pytest.raises(DataMissing, match=r"Looked for: files that end with .txt in .*/train"):
        read(root, "train", share=None)
    before = read(root, "train")
    (root / "val").write_text("This file is no folder.")
    assert read(root, "train") == before


def test_the_tokens_are_kept_until_a_file_changes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read(root, "train")
    with monkeypatch.context() as patch:
        patch.setattr("gpipe.data.text.text_folder._encode", lambda *_: pytest.fail("read again"))
        assert read(root, "train") == first
    (root / "a.txt").write_text("\n".join(reversed(LINES)))
    assert read(root, "train") != first


@pytest.mark.parametrize("size", [0, 100, 200])
def test_a_damaged_cache_is_made_again(root: Path, size: int) -> None:
    first = read(root, "train")
    (cached,) = (root / ".token_cache").glob("*.npy")
    os.truncate(cached, size)
    assert read(root, "train") == first
    assert cached.stat().st_size > 200


def test_tokens_that_an_earlier_program_cut_otherwise_are_cut_again(root: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_folder, "_FORMAT", text_folder._FORMAT - 1)
        patch.setattr(text_folder, "_encode", lambda *_: np.arange(99, dtype=np.int32))
        assert read(root, "train")[0] == list(range(17))
    assert read(root, "train")[0] == tokens_of(LINES)[:17]


def test_without_a_lock_no_cache_is_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(f"{path} cannot be locked")

    monkeypatch.setattr(text_folder, "locked", refuse)
    assert read(root, "train") and not [*root.rglob("*.npy")]  # two processes would write one file at once


def test_lines_end_as_those_of_any_system_do(tmp_path: Path) -> None:
    found = []
    for number, end in enumerate((b"\n", b"\r\n", b"\r")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "a.txt").write_bytes(end.join(line.encode() for line in LINES))
        found.append(read(folder, "train"))
    assert found[0] == found[1] == found[2]


def test_processes_that_start_together_read_the_text_once(root: Path, processes: ProcessPool) -> None:
    expected = read(root, "train")
    for path in (root / ".token_cache").glob("*.npy"):
        path.unlink()
    found = processes.run(4, read_and_count, str(root))
    assert [sequences for sequences, _ in found] == [expected] * 4
    assert sum(num_read for _, num_read in found) == 2, "each of the two files once"


def read_and_count(rank: int, root: str) -> tuple[list[list[int]], int]:
    """Read a text; return its sequences, and how many of its files this process has cut into tokens."""
    encode, num_read = text_folder._encode, 0

    def counted(*args: Any) -> Any:
        nonlocal num_read
        num_read += 1
        time.sleep(0.2)
        return encode(*args)

    text_folder._encode = counted
    try:
        return read(Path(root), "train"), num_read
    finally:
        text_folder._encode = encode


def test_what_cannot_be_read_is_said(root: Path) -> None:
    with pytest.raises(
        ValueError, match=r"expected at least data.sequence_length \+ 1 = 100001: add text, lower .*=0.25, or"
    ):
        read(root, "train", length=100_000)
    with pytest.raises(ValueError, match=r"= 100001: add text, raise data.validation_share=0.25, or lower data.seq"):
        read(root, "test", length=100_000)
    (root / "a.txt").write_bytes("Blödsinn".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a.txt:1 is not UTF-8 \(byte 3 of the line is 0xf6\): convert the file"):
        read(root, "train")
    (root / "a.txt").write_bytes(b"good\n" * 12_000 + b"caf\xe9\n")  # more than is read at once
    with pytest.raises(ValueError, match=r"a.txt:12001 is not UTF-8"):
        read(root, "train")
    (root / "a.txt").write_text("\n\n")
    (root / "deep" / "b.txt").write_text("")
    with pytest.raises(ValueError, match=r"the train text in .* has 0 tokens, expected at least"):
        read(root, "train")
    with pytest.raises(DataMissing, match=r"Looked for: the folder data.root, which is not set"):
        check_data("text_folder")


def test_an_unknown_split_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="unknown split 'valid': choose one of train, test"):
        open_text_folder(root, "valid", TOKENIZER, 16, 0.25)


def test_no_id_is_outside_of_the_vocabulary(root: Path) -> None:
    assert np.max(read(root, "train")) < TOKENIZER.vocabulary_size
