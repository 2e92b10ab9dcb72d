"""What the paper printed: every table as data, to be laid next to our own measurements.

Reference: Zhang et al., "COME: Test-time Adaption by Conservatively Minimizing Entropy", ICLR 2025.
"""

from come.bench.paper.published import Column, PaperImprove, PaperRow, PaperTable, get, inconsistencies, names, rank

__all__ = ["Column", "PaperImprove", "PaperRow", "PaperTable", "get", "inconsistencies", "names", "rank"]
