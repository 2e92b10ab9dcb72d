"""From records to what people read: tables for the terminal and for files, figures, and a page."""

from come.bench.report.configurations import configurations, describe_configurations
from come.bench.report.figures import write_figures
from come.bench.report.formats import to_csv, to_json, to_latex, to_markdown
from come.bench.report.html import write_html
from come.bench.report.tables import Table, metrics_table, rates_table, results_table, to_rich, without_sweeps
from come.bench.report.writing import write_report, write_text

__all__ = [
    "Table",
    "configurations",
    "describe_configurations",
    "metrics_table",
    "rates_table",
    "results_table",
    "to_csv",
    "to_json",
    "to_latex",
    "to_markdown",
    "to_rich",
    "without_sweeps",
    "write_figures",
    "write_html",
    "write_report",
    "write_text",
]
