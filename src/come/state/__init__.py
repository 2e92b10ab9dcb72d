"""An adapter's state as tensors and as files."""
