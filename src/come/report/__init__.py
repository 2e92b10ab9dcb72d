"""From records to what people read: tables for the terminal and for files."""

from come.report.tables import Table, results_table, to_markdown, to_rich
from come.report.writing import write_report

__all__ = ["Table", "results_table", "to_markdown", "to_rich", "write_report"]
