"""Models of other libraries on sequences that are cut over ranks. The libraries are imported when they are used."""

from flexsp.integrations import fla, transformers

__all__ = ["fla", "transformers"]
