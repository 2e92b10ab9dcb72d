"""What an adapter remembers, as tensors and as files."""
