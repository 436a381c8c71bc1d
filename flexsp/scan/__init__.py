"""The associative scan of (A, F) over segments and ranks."""
