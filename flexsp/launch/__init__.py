"""Start-up under torchrun and the `flexsp` command."""
