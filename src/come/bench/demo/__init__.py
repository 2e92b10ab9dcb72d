"""`come demo`: methods side by side on one stream, in a browser, on this machine."""
