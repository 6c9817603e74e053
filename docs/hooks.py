"""A hook of MkDocs that adds the pages of the claims to the site: they live beside their records, not in docs/."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add reproductions/README.md and the page of each claim."""
    for page in sorted((ROOT / "reproductions").rglob("README.md")):
        files.append(File.generated(config, str(page.relative_to(ROOT)), abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links lead to the same pages as in the repository, where a link to a folder shows its README.md."""
    if page.file.src_uri.startswith("reproductions/"):
        return re.sub(r"\]\(((?:\.\./)?[a-z0-9_]+)\)", r"](\1/README.md)", markdown)
    return markdown.replace("](../reproductions/", "](reproductions/")
