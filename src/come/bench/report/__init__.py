"""From records to what people read: tables for the terminal and for files, figures, and a page."""

from come.bench.report.figures import write_figures
from come.bench.report.formats import to_csv, to_json, to_latex
from come.bench.report.html import write_html
from come.bench.report.tables import Table, configurations, metrics_table, results_table, to_markdown, to_rich
from come.bench.report.writing import write_report

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
