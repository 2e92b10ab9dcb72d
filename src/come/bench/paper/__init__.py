"""The tables of the paper as data, what they are compared with, and the plans that regenerate them.

Reference: Zhang et al., "COME: Test-time Adaption by Conservatively Minimizing Entropy", ICLR 2025.
"""

from come.bench.paper.published import Column, PaperImprove, PaperRow, PaperTable, get, inconsistencies, names, rank

__all__ = ["Column", "PaperImprove", "PaperRow", "PaperTable", "get", "inconsistencies", "names", "rank"]
