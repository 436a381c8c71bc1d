"""A hook of mkdocs: files of the site that do not stand in docs/. MathJax, from the package django-static-mathjax, and
pictures of benchmarks/."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

__all__ = ["mathjax_files", "on_files", "on_page_markdown"]

ROOT = Path(__file__).resolve().parents[1]
_PICTURES = "benchmarks/results"


def mathjax_files() -> dict[str, Path]:
    """The script and the fonts that it loads: place in the site -> file.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    found = importlib.util.find_spec("mathjax")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the site ships MathJax: pip install django-static-mathjax", name="mathjax")
    home = Path(found.submodule_search_locations[0]) / "static" / "mathjax"
    fonts = sorted((home / "es5" / "output" / "chtml" / "fonts" / "woff-v2").glob("*.woff"))
    files = [home / "es5" / "tex-chtml.js", *fonts]
    shipped = {f"assets/mathjax/{path.relative_to(home / 'es5')}": path for path in files}
    return shipped | {"assets/mathjax/LICENSE.txt": home / "LICENSE"}


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    pictures = {path.name: path for path in sorted((ROOT / _PICTURES).glob("*.png"))}
    for place, path in (mathjax_files() | pictures).items():
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Pictures of benchmarks/ are beside the site's pages."""
    return re.sub(rf"\]\(\.\./{_PICTURES}/([\w.]+\.png)\)", r"](\1)", markdown)
