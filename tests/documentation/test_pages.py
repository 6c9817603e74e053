"""What the README, the guides and the other pages show works as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose
from safetensors.torch import save_file
from torch.distributed.run import get_args_parser

from docs import pictures
from experiments.data.write_sentences import write_sentences
from gpipe.config import to_run
from gpipe.data import Tokenizer
from gpipe.data.text.text_folder import open_text_folder
from gpipe.programs.build import build_layers
from tests.support.program_server import run_program

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
FOLDERS = ("docs", "notebooks", "reproductions", "src/gpipe/data/embedded")
PAGES = sorted(
    path.relative_to(ROOT)
    for path in (*ROOT.glob("*.md"), *(found for name in FOLDERS for found in (ROOT / name).rglob("*.md")))
)


def find_code(page: str, name: str) -> str:
    """Return the code under a comment with this name."""
    match = re.search(f"<!-- {name} -->\n```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    assert match is not None
    return match[1]


def run_code(folder: Path, code: str) -> str:
    """Run code in a process of its own and return what it prints."""
    program = folder / "example.py"
    program.write_text(code, "utf-8")
    done = run_program(program, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_of_the_readme_pipelines_a_model_in_eight_lines(tmp_path: Path) -> None:
    example = find_code("README.md", "example")
    lines = [line for line in example.splitlines() if line and not line.startswith(("import ", "from "))]
    assert len(lines) == 8
    printed = run_code(
        tmp_path, f"{example}print(report.loss, pipeline.partitions, pipeline.evaluate(torch.randn(64, 32)).shape)"
    )
    assert re.fullmatch(r"\d+\.\d+ \(\d, \d\) torch\.Size\(\[64, 10\]\)\n", printed)


def test_the_example_of_the_guide_trains_with_batch_norm_and_dropout(tmp_path: Path) -> None:
    printed = run_code(tmp_path, find_code("docs/library.md", "example"))
    assert re.fullmatch(r"\d+\.\d+ torch\.Size\(\[64, 10\]\)\n", printed)


def test_the_example_of_a_model_that_is_no_sequence_trains(tmp_path: Path) -> None:
    assert re.fullmatch(r"\d+\.\d+ True\n", run_code(tmp_path, find_code("docs/library.md", "traced")))


def test_the_example_of_a_loop_saves_and_resumes(tmp_path: Path) -> None:
    printed = run_code(tmp_path, find_code("docs/library.md", "loop"))
    assert re.fullmatch(r"\d+\.\d+ \d+\.\d+ torch\.Size\(\[8, 10\]\)\n", printed)


def test_the_example_of_a_timeline_draws_it(tmp_path: Path) -> None:
    assert run_code(tmp_path, find_code("docs/library.md", "timeline")) == ""
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_the_example_of_a_tokenizer_trains_one_on_a_folder_of_text(tmp_path: Path) -> None:
    write_sentences(tmp_path / "sentences")
    assert re.fullmatch(r"\[\d+(, \d+)+\]\n", run_code(tmp_path, find_code("docs/own_text.md", "tokenizer")))
    root, tokenizer = str(tmp_path / "sentences"), Tokenizer(tmp_path / "sentences" / "tokenizer.model")
    assert len(open_text_folder(root, "test", tokenizer, 64, None)) > 100


@pytest.mark.slow
def test_the_example_of_compiled_layers_trains(tmp_path: Path) -> None:
    assert re.fullmatch(r"\d+\.\d+\n", run_code(tmp_path, find_code("docs/library.md", "compiled")))


@pytest.mark.usefixtures("composer")
def test_what_quickstart_trains_is_loaded_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = build_layers(to_run(compose("train", overrides=["+experiment=amoebanet_imagenet_laptop"])))
    saved = {name: torch.full_like(tensor, 0.5, device="cpu") for name, tensor in layers.state_dict().items()}
    save_file(saved, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(find_code("docs/checkpoints.md", "export"), found)
    loaded = found["model"].state_dict()
    assert loaded.keys() == saved.keys() and len(saved) > 400
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.items())


def test_the_guide_to_stopping_names_the_signals_that_torchrun_forwards() -> None:
    *names, last = get_args_parser().parse_args(["train.py"]).signals_to_handle.split(",")
    assert f"torchrun forwards {', '.join(names)} and {last}," in (ROOT / "docs/stopping.md").read_text("utf-8")


def test_the_readme_is_short_and_so_are_its_sentences() -> None:
    assert len(README.splitlines()) <= 170
    prose = re.sub(
        r"```.*?```|<!-- table.*?<!-- end -->|^(    |\||#|!).*?$", "", README, flags=re.DOTALL | re.MULTILINE
    )
    prose = re.sub(r"\]\([^)]*\)|<!--.*?-->", "", prose)
    sentences = re.split(r"(?<=[.!?])\s+|\n\n|\n- ", prose)
    assert len(sentences) > 30
    assert [sentence for sentence in sentences if len(sentence.split()) > 20] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_of_a_page_leads_to_something(page: Path) -> None:
    text = (ROOT / page).read_text("utf-8")
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", text):
        target = (ROOT / page.parent / link).resolve() if link else ROOT / page
        assert target.exists(), link
        if anchor and target.suffix == ".md" and "api" not in target.parts:
            assert anchor in headings(target), f"{link}#{anchor}"


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    found = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in found}


def test_the_picture_of_the_readme_is_what_the_schedule_and_the_record_draw() -> None:
    for file, picture in {pictures.PICTURE: pictures.draw_picture(), **pictures.draw_badges()}.items():
        assert picture == file.read_text("utf-8"), "run python docs/pictures.py"


def test_the_site_is_built_without_a_warning_and_needs_no_other_host(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert {"index.html", "library.html", "pipeline.html"} <= {page.name for page in pages}
    loaded = r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*(?:src|href)="https?:'
    assert [page.name for page in pages if re.search(loaded, page.read_text("utf-8"))] == []
