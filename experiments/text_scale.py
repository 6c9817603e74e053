"""Measure the memory and the time that a corpus needs until the first mini-batch, by its number of pairs.

    python -m experiments.text_scale

Writes parallel text of 1, 4 and 16 million pairs (made-up sentences of two to four words, four languages) into a
temporary folder. Fresh processes then open it as training does: first to tokenise it into the cache; then, with the
cache ready, up to the first mini-batch of epoch 0, and up to a mini-batch in the middle of epoch 1, as after a resume.
Memory is the peak minus the memory after the imports. It is given as private memory, and as resident memory with those
pages of the mapped cache that the system may reclaim. The parent process reads it from /proc a thousand times per
second. Time is wall time and CPU time; other programs disturb the latter less.

The sizes take turns. Each round has two processes. Before the first one, the cache's files are dropped from the page
cache of the system, so it reads them from the disk; only its time is kept. The second one finds them in the page cache.
The fastest round counts for times, because other programs can only slow a round down; the median counts for memory.
Half an hour, and 4 GB of disk.
"""

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.program import StudyProgram, track
from gpipe.data import SPLITS, open_corpus, open_tokenizer
from gpipe.data.text.multilingual_text import read_embedded
from reproductions import ROOT
from reproductions.figure3_multilingual.text_scale import BUILD, RESUME, START, TEXT_SCALE

CLAIM = "figure3_multilingual"
SHARES = {"a": 0.6, "b": 0.25, "c": 0.1, "d": 0.05}  # of the pairs, by language
MAX_TOKENS, TEMPERATURE, SEED = 64, 1 / 0.7, 0
NUM_HALVES, BLOCK = 1 << 13, 100_000


def write_text(root: Path, num_pairs: int) -> None:
    """Write parallel text: each line joins two of 8,192 halves, so hardly any line comes twice."""
    words = sorted({word for pair in read_embedded()["de"] for word in pair.target.split()})
    generator = np.random.default_rng(SEED)
    halves = [
        " ".join(words[i] for i in generator.integers(len(words), size=n)) for n in generator.integers(1, 3, NUM_HALVES)
    ]
    root.mkdir()
    for split in SPLITS:
        for language, share in SHARES.items():
            for side in (language, "en"):
                with (root / f"{split}.{language}-en.{side}").open("w", encoding="utf-8") as file:
                    left = round(share * num_pairs) if split == "train" else 10
                    while left:
                        picked = generator.integers(NUM_HALVES, size=(min(left, BLOCK), 2)).tolist()
                        file.writelines(f"{halves[first]} {halves[second]}\n" for first, second in picked)
                        left -= len(picked)


def build(root: Path) -> dict[str, Any]:
    """Tokenise the corpus in this process; return the seconds and the number of tokens."""
    started = time.perf_counter()
    tokenizer = open_tokenizer("parallel_text", None)
    corpus = open_corpus("parallel_text", "train", root, tokenizer=tokenizer, languages=None, max_tokens=MAX_TOKENS)
    return {"seconds": time.perf_counter() - started, "num_tokens": int(corpus.num_tokens().sum())}


def open_up_to_batch(root: Path, batch_size: int, what: str) -> dict[str, Any]:
    """Open the corpus in this process, up to a mini-batch; return the seconds and the mini-batches per epoch."""
    from gpipe.data import TranslationLoader

    started, started_working = time.perf_counter(), time.process_time()
    tokenizer = open_tokenizer("parallel_text", None)
    corpus = open_corpus("parallel_text", "train", root, tokenizer=tokenizer, languages=None, max_tokens=MAX_TOKENS)
    loader = TranslationLoader(corpus, batch_size, SEED, shuffle=True, temperature=TEMPERATURE)
    loader.set_epoch(0 if what == START else 1)
    loader.batch_numbers = range(0 if what == START else len(loader) // 2, len(loader))
    next(iter(loader))
    seconds, seconds_of_work = time.perf_counter() - started, time.process_time() - started_working
    return {"seconds": seconds, "seconds_of_work": seconds_of_work, "num_batches": len(loader)}


def work(root: str, batch_size: int, what: str) -> None:
    """Be a process of the study: finish the imports, wait for `watch`, and open the corpus."""
    if what != BUILD:
        import torch

        import gpipe.data.text.translation_loader  # noqa: F401

        torch.set_num_threads(1)
    print("ready", flush=True)
    input()
    found = build(Path(root)) if what == BUILD else open_up_to_batch(Path(root), batch_size, what)
    print(json.dumps(found), flush=True)


def read_memory(pid: int) -> tuple[int, int]:
    """Return the private and the resident bytes of a process."""
    resident, shared = (int(pages) for pages in Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    page = os.sysconf("SC_PAGE_SIZE")
    return (resident - shared) * page, resident * page


def watch(root: Path, batch_size: int, what: str) -> dict[str, Any]:
    """Let a fresh process open the corpus; return its results with the peaks of its memory."""
    code = f"from experiments.text_scale import work; work({str(root)!r}, {batch_size}, {what!r})"
    arguments = [sys.executable, "-c", code]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the process that opens the corpus did not start")
        before = peaks = read_memory(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        while not select.select([process.stdout], [], [], 0.001)[0]:
            peaks = tuple(map(max, peaks, read_memory(process.pid)))
        found: dict[str, Any] = json.loads(process.stdout.readline())
        private, resident = (peak - first for peak, first in zip(peaks, before, strict=True))
    return {**found, "private_bytes": private, "resident_bytes": resident}


def forget_pages(root: Path) -> None:
    """Drop the cache from the system's page cache, so that it is read from the disk."""
    for path in root.glob("token_cache/*/*"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the least of each time, and the median of every other figure."""
    return {
        name: min(values) if name.startswith("seconds") else statistics.median(values)
        for name, values in ((name, [run[name] for run in runs]) for name in runs[0])
    }


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row per size."""
    rows = []
    for size in track(options.sizes, "sizes tokenised"):
        root = folder / str(size)
        write_text(root, size)
        text_bytes = sum(path.stat().st_size for path in root.glob("train.*"))
        row = {"num_pairs": size, "text_bytes": text_bytes, BUILD: watch(root, options.batch_size, BUILD)}
        row["cache_bytes"] = sum(path.stat().st_size for path in root.glob("token_cache/train.*/*"))
        rows.append(row)
    runs: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for _, size, what in track(list(product(range(options.rounds), options.sizes, (START, RESUME))), "openings"):
        root = folder / str(size)
        forget_pages(root)
        cold, warm = (watch(root, options.batch_size, what) for _ in range(2))
        runs.setdefault((size, what), []).append({**warm, "seconds_from_disk": cold["seconds"]})
    for row in rows:
        row |= {what: summarize(runs[row["num_pairs"], what]) for what in (START, RESUME)}
    return rows


if __name__ == "__main__":
    program = StudyProgram(__doc__, {CLAIM: TEXT_SCALE.tables}, rounds=9)
    parser = program.parser
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 4_000_000, 16_000_000], help="pairs")
    parser.add_argument("--batch-size", type=int, default=262_144, help="tokens")
    options = program.parse()
    with tempfile.TemporaryDirectory() as name:
        rows = measure(Path(name), options)
    config = {"batch_size": options.batch_size, "rounds": options.rounds, "shares": SHARES}
    config |= {"max_tokens": MAX_TOKENS, "temperature": TEMPERATURE}
    program.publish_record(TEXT_SCALE.make_record(config, {"rows": rows}))
