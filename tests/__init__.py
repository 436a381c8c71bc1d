"""A package, so that no folder in it is found as `kernels` or `comm`, which other packages are called."""
