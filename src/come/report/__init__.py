"""From records to what people read: tables for the terminal and for files, figures, and a page."""

from come.report.figures import write_figures
from come.report.formats import to_csv, to_json, to_latex
from come.report.html import write_html
from come.report.tables import Table, configurations, metrics_table, results_table, to_markdown, to_rich
from come.report.writing import write_report

__all__ = [
    "Table",
    "configurations",
    "metrics_table",
    "results_table",
    "to_csv",
    "to_json",
    "to_latex",
    "to_markdown",
    "to_rich",
    "write_figures",
    "write_html",
    "write_report",
]
