# SPDX-License-Identifier: Apache-2.0
"""A mkdocs hook that lets pages link to files of benchmarks/results by their paths in the repository.

The same Markdown works on the site and in the repository, and a wrong path fails the build.
"""

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

RESULTS = "benchmarks/results/"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the plots and JSON files."""
    root = Path(config.config_file_path).parent
    for path in sorted((root / RESULTS).rglob("*.*")):
        files.append(File.generated(config, path.relative_to(root).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the paths by the site's."""
    return markdown.replace(f"../{RESULTS}", RESULTS)
