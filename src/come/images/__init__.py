"""Images: random views, and the way between normalized tensors and pixels."""
