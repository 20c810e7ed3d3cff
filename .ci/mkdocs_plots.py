# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: pages show plots of benchmarks/results by the paths that they have in the repository.

So the same Markdown shows them here and where the repository is browsed, and a path that is wrong fails
the build as any link does.
"""

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

RESULTS = "benchmarks/results/"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the plots."""
    root = Path(config.config_file_path).parent
    for plot in sorted((root / RESULTS).rglob("*.png")):
        files.append(File.generated(config, plot.relative_to(root).as_posix(), abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Their paths as the site has them."""
    return markdown.replace(f"../{RESULTS}", RESULTS)
