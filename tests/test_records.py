"""Records go to disk and come back, and wrong ones are refused with their place."""

import json
import math
import os
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from gpipe import records
from gpipe.records import (
    RECORD_FILE,
    Record,
    append_record,
    describe_hardware,
    differences,
    git_state,
    make_record,
    package_versions,
    read_records,
    same_settings,
    without_places,
    write_record,
)


def some_record() -> Record:
    """The record of a run that was not."""
    return make_record(
        kind="measured",
        command="python train.py +experiment=amoebanet_imagenet_laptop",
        experiment="amoebanet_imagenet",
        config={"pipeline": {"num_stages": 2}},
        seed=3,
        results={"top1": 0.84, "top5": None},
        gpus=["NVIDIA P100"],
    )


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record = some_record()
    write_record(tmp_path / "runs" / RECORD_FILE, record)
    assert read_records(tmp_path / "runs" / RECORD_FILE) == [record]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [RECORD_FILE]


def test_lines_of_records_come_back_in_order(tmp_path: Path) -> None:
    records = [replace(some_record(), seed=seed) for seed in (2, 0, 1)]
    for record in records:
        append_record(tmp_path / "runs.jsonl", record)
    assert read_records(tmp_path / "runs.jsonl") == records


def test_a_folder_gives_every_record_below_it(tmp_path: Path) -> None:
    for seed in (1, 0):
        write_record(tmp_path / "table" / str(seed) / RECORD_FILE, replace(some_record(), seed=seed))
    assert [record.seed for record in read_records(str(tmp_path))] == [0, 1]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"kind": "guessed"}, "kind is 'guessed'"),
        ({"seed": "3"}, "seed is '3', but it must be int"),
        ({"seed": True}, "seed is True"),
        ({"results": []}, "results is"),
        ({"dirty": 1}, "dirty is 1"),
        ({"date": "yesterday"}, "yesterday"),
        ({"schema_version": 2}, "schema_version is 2"),
        ({"host": "here"}, r"\['host'\] are missing or unknown"),
    ],
)
def test_a_wrong_record_is_refused_with_its_place(tmp_path: Path, change: dict[str, object], fault: str) -> None:
    path = tmp_path / "runs.jsonl"
    good = asdict(some_record())
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"line 2: .*{fault}"):
        read_records(path)


def test_a_record_cut_short_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / RECORD_FILE
    path.write_text(json.dumps(asdict(some_record()))[:-5], encoding="utf-8")
    with pytest.raises(ValueError, match=RECORD_FILE):
        read_records(path)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="a record is a JSON object, not list"):
        read_records(path)


def test_a_number_that_is_not_finite_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    record = replace(some_record(), results={"loss": math.nan})
    with pytest.raises(ValueError, match="JSON"):
        write_record(tmp_path / RECORD_FILE, record)
    with pytest.raises(ValueError, match="JSON"):
        append_record(tmp_path / "runs.jsonl", record)
    assert list(tmp_path.iterdir()) == []


def test_the_git_state_is_the_commit_and_whether_files_differ(tmp_path: Path) -> None:
    assert git_state(tmp_path) == (None, None)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x", "-c", "init.defaultBranch=main"]
    (tmp_path / "a").write_text("1", encoding="utf-8")
    for arguments in (["init", "-q"], ["add", "a"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *arguments], check=True)
    commit, dirty = git_state(tmp_path)
    assert commit is not None and len(commit) == 40 and dirty is False
    (tmp_path / "left_by_a_run").touch()
    assert git_state(tmp_path) == (commit, False)
    (tmp_path / "a").write_text("2", encoding="utf-8")
    assert git_state(tmp_path) == (commit, True)


def test_pages_and_records_that_differ_do_not_make_a_record_dirty(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x", "-c", "init.defaultBranch=main"]
    files = [tmp_path / name for name in ("README.md", "reproductions/claim/runs.jsonl", "src/a.py")]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1", encoding="utf-8")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *arguments], check=True)
    for file, is_dirty in zip(files, (False, False, True), strict=True):
        file.write_text("2", encoding="utf-8")
        assert git_state(tmp_path / "src")[1] == is_dirty


@pytest.mark.parametrize("script", ["exec sleep 60", "printf '\\377\\n'; kill -9 $$", "exit 128"])
def test_a_git_that_does_not_answer_ends_no_run(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (git := tmp_path / "git").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(records, "_GIT_SECONDS", 0.3)
    assert git_state(Path()) == (None, None)


def test_the_hardware_has_no_host_name() -> None:
    hardware = describe_hardware(["GPU"])
    assert set(hardware) == {"cpu", "instructions", "num_cores", "gpus"}
    kernels = {"avx512f": "AVX512", "avx2": "AVX2"}.get(hardware["instructions"], "")
    assert torch.backends.cpu.get_cpu_capability().startswith(kernels) or "ATEN_CPU_CAPABILITY" in os.environ
    assert hardware["cpu"] and hardware["num_cores"] >= 1 and hardware["gpus"] == ["GPU"]


def test_versions_are_of_installed_packages_only() -> None:
    versions = package_versions(["torch", "no-such-package-here"])
    assert set(versions) == {"python", "torch"}


def test_the_same_settings_elsewhere_are_the_same() -> None:
    here = {"seed": 1, "data": {"name": "digits", "root": "a", "num_workers": 0}, "trainer": {"resume_from": None}}
    there = {**here, "data": {"name": "digits", "root": "b", "num_workers": 4}, "trainer": {"resume_from": "x"}}
    assert same_settings(here, {**there, "launch": {"num_processes": 2}, "tracking": {"mode": "online"}})
    assert not same_settings(here, {**there, "launch": {"num_processes": 2, "num_replicas": 2}})
    assert not same_settings(here, {**there, "seed": 2})
    assert not same_settings(here, {**there, "data": {"name": "mnist_5k"}})


def test_an_argument_of_a_librarys_model_that_only_one_run_gives_is_a_difference() -> None:
    plain, dropping = ({"model": {"arguments": arguments}} for arguments in ({}, {"drop_rate": 0.5}))
    assert differences(plain, dropping) == ['model.arguments is {} there, {"drop_rate": 0.5} here']
    assert differences(dropping, plain) == ['model.arguments is {"drop_rate": 0.5} there, {} here']
    assert differences(dropping, dropping) == differences({"model": {}}, dropping) == []


@pytest.mark.parametrize("path", ["/home/somebody/sets/fashion-mnist", "/home/somebody/sets/fashion-mnist/"])
def test_a_published_record_has_no_folders_of_the_machine(path: str) -> None:
    config = {"data": {"root": path}, "init_from": "runs/name/2026-01-01", "learning_rate": 0.5}
    record = replace(
        some_record(), config=config, command=f"python x.py data.root={path} --clone {path} y=runs/z a / b"
    )
    published = without_places(record)
    assert published.config == {**config, "data": {"root": "<...>/fashion-mnist"}}
    assert published.command == "python x.py data.root=<...>/fashion-mnist --clone <...>/fashion-mnist y=runs/z a / b"
    assert replace(published, config=config, command=record.command) == record


@pytest.mark.parametrize("folder", ["/home/jürgen", "/home/jane doe/my sets", "/home/o'brien"])
def test_a_published_record_has_no_folders_that_a_shell_needs_in_quotes(folder: str) -> None:
    path, mark = f"{folder}/pets & more", '"' if "'" in folder else "'"
    config = {"data": {"root": path}, "overrides": [f"data.root={path}", "y=runs/z"]}
    command = (
        f"python x.py {mark}{path}{mark} data.root={mark}{path}{mark} {mark}data.root={path}{mark} {mark}a/b{mark}"
    )
    published = without_places(replace(some_record(), config=config, command=command))
    hidden = "<...>/pets & more"
    assert published.config == {"data": {"root": hidden}, "overrides": [f"data.root={hidden}", "y=runs/z"]}
    assert published.command == command.replace(path, hidden)
    assert without_places(published) == published
