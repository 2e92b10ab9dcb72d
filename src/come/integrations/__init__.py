"""Adapters for other packages, one file each; each needs its extra, and `import come` imports none."""
