"""Tables as files for other programs: LaTeX for a paper, CSV and JSON for a notebook."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator

from come.bench.report.tables import Entry, Table

LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    '"': r"\textquotedbl{}", "|": r"\textbar{}", "\n": " ", "\r": " ", "\t": " ",
    "±": r"$\pm$", "△": r"$\triangle$", "▽": r"$\triangledown$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "·": r"$\cdot$",
}  # fmt: skip
"""What LaTeX would take for a command, and the signs of our tables."""


def to_latex(table: Table) -> str:
    r"""The table for a paper; it needs `\usepackage{booktabs,amssymb}`, and with other alphabets a font that has them.

    Substantial changes are bold, as in the Markdown table. All text is escaped.

    Example:
        >>> from come.bench.report.tables import Row
        >>> entry = Entry(52.13, 0.4)
        >>> print(to_latex(Table("A & B", ("Fog",), (Row("tent", "em", (entry,), "em"),), (("fog", "accuracy"),))))
        \begin{table}
        \centering
        \caption{A \& B}
        \begin{tabular}{lr}
        \toprule
         & Fog \\
        \midrule
        tent + em & 52.1$\pm$0.4 \\
        \bottomrule
        \end{tabular}
        \end{table}
    """
    lines = [r"\begin{table}", r"\centering"]
    lines += [rf"\caption{{{_escaped(table.title)}}}"] if table.title else []
    lines += [rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}", r"\toprule"]
    lines += [_line(["", *map(_escaped, table.columns)]), r"\midrule"]
    for before, row in zip((None, *table.rows), table.rows, strict=False):
        if before is not None and before.method != row.method:
            lines.append(r"\midrule")
        name = r"\quad Improve" if row.objective == "improve" else _escaped(row.name)
        lines.append(_line([name, *map(_cell, row.entries)]))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])


def _line(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _cell(entry: Entry | None) -> str:
    if entry is None:
        return _escaped("·")
    text = _escaped(str(entry))
    return rf"\textbf{{{text}}}" if entry.change in ("better", "worse") else text


def _escaped(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)


COLUMNS = ("method", "objective", "domain", "metric", "mean", "spread", "seeds")


def to_csv(table: Table) -> str:
    """One line for each number, not rounded: method, objective, domain (or "average"), metric, mean, spread, seeds.

    Numbers are in percent, but nll is in nats and brier as it is. The spread is the standard deviation over seeds, empty
    with one seed; the mean is empty where a cell is missing. Differences are left to whoever reads it.

    Example:
        >>> from come.bench.report.tables import Row
        >>> table = Table("", ("Fog",), (Row("tent", "em", (Entry(52.13),), "em"),), (("fog", "accuracy"),))
        >>> print(to_csv(table), end="")
        method,objective,domain,metric,mean,spread,seeds
        tent,em,fog,accuracy,52.13,,1
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_numbers(table))
    return text.getvalue()


def to_json(table: Table) -> str:
    """The same numbers as `to_csv`, as `{"title": ..., "numbers": [...]}` with null where there is none.

    Example:
        >>> from come.bench.report.tables import Row
        >>> table = Table("T", ("Fog",), (Row("tent", "em", (None,), "em"),), (("fog", "accuracy"),))
        >>> json.loads(to_json(table))["numbers"][0]["mean"] is None
        True
    """
    return json.dumps({"title": table.title, "numbers": list(_numbers(table))}, indent=1, allow_nan=False) + "\n"


def _numbers(table: Table) -> Iterator[dict[str, str | float | None]]:
    for row in (row for row in table.rows if row.ran_with):
        for (domain, metric), entry in zip(table.keys, row.entries, strict=True):
            numbers = (None, None, 0) if entry is None else (entry.mean, entry.spread, entry.seeds)
            yield dict(zip(COLUMNS, (row.method, row.ran_with, domain, metric, *numbers), strict=True))
