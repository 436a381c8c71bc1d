"""A hook of mkdocs: in a page, the line `::: all of flexsp.ops` stands for every public name of that module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from types import ModuleType
from typing import Any

__all__ = ["expanded", "on_page_markdown"]


def expanded(markdown: str) -> str:
    """The page with a `::: path` for each public name in place of each `::: all of module`."""
    return re.sub(r"^::: all of (\S+)$", lambda found: _listed(found[1]), markdown, flags=re.MULTILINE)


def _listed(module: str) -> str:
    """The names that stand on no page of the package above; `recurrent_gla` follows `chunk_gla`."""
    home, above = importlib.import_module(module), importlib.import_module(module.rpartition(".")[0]).__all__
    names = [name for name in home.__all__ if name not in above]
    names.sort(key=lambda name: (re.sub("^(chunk|recurrent)_", "", name).lower(), name))
    return "\n\n".join(f"::: {_path(module, name)}{_options(getattr(home, name))}" for name in names)


def _path(module: str, name: str) -> str:
    """Of a public name. A file of the same name would be taken for what is meant, and all that it holds be listed."""
    x = getattr(importlib.import_module(module), name)
    same = not inspect.ismodule(x) and importlib.util.find_spec(f"{module}.{name}") is not None
    return f"{module}.{name}.{name}" if same else f"{module}.{name}"


def _options(x: Any) -> str:
    if isinstance(x, ModuleType):
        return "\n    options:\n      show_root_heading: true\n      members: []"
    if inspect.isclass(x) and hasattr(x, "step") and hasattr(x, "init_cache"):  # a layer, whose base class has these
        return "\n    options:\n      inherited_members: [forward, step, init_cache]"
    return ""


def on_page_markdown(markdown: str, **_: Any) -> str:
    return expanded(markdown)
