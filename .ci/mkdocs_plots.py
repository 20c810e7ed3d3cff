# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: pages link to files of benchmarks/results by their paths in the repository.

So the same Markdown works here and where the repository is browsed, and a path that is wrong fails
the build as any link does.
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
    """Their paths as the site has them."""
    return markdown.replace(f"../{RESULTS}", RESULTS)
