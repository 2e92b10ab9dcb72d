"""Other packages around an adapter, one file each; each needs its extra, and none is imported by `import come`."""
