"""Writes tables as Markdown, LaTeX, CSV and JSON, and escapes the names in them."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator

from come.bench.report.tables import METRICS, Entry, Row, Table


def to_markdown(table: Table) -> str:
    """The table as GitHub-flavoured Markdown; differences that were found are bold."""
    lines = [f"### {plain_markdown(table.title)}\n"] if table.title else []
    lines.append("|".join(["", " ", *map(plain_markdown, table.columns), ""]))
    lines.append("|---|" + "---:|" * len(table.columns))
    for row in table.rows:
        cells = [_bold(e, "**{}**", str, row) for e in row.entries]
        lines.append("|".join(["", plain_markdown(row.name.strip()), *cells, ""]))
    return "\n".join(lines) + "\n"


def plain_markdown(text: str) -> str:
    r"""The text so that Markdown shows it as it is.

    >>> print(plain_markdown("a|b <i>"))
    a\|b \<i\>
    """
    return re.sub(r"([\\`*_{}\[\]<>#|~$&])", r"\\\1", text)


def _bold(entry: Entry | None, form: str, escaped: Callable[[str], str], row: Row) -> str:
    text = escaped(("" if row.score else "·") if entry is None else str(entry))
    return form.format(text) if entry is not None and entry.change in ("better", "worse") else text


LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "[": "{[}", "]": "{]}", "*": "{*}", '"': r"\textquotedbl{}", "|": r"\textbar{}", "\n": " ", "\r": " ", "\t": " ",
    "±": r"$\pm$", "△": r"$\triangle$", "▽": r"$\triangledown$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "·": r"$\cdot$",
}  # fmt: skip
"""Characters that are commands of LaTeX, and the signs of our tables."""


def to_latex(table: Table) -> str:
    r"""The table for a paper; it needs `\usepackage{booktabs,amssymb}`, and with other alphabets a font that has them.

    Differences that were found are bold. All text is escaped.
    """
    lines = [r"\begin{table}", r"\centering"]
    lines += [rf"\caption{{{_escaped(table.title)}}}"] if table.title else []
    lines += [rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}", r"\toprule"]
    lines += [" & ".join(["", *map(_escaped, table.columns)]) + r" \\"]
    before = ""
    for row in table.rows:
        if row.method != before or not before:
            lines.append(r"\midrule")
        name = (r"\quad " if row.name.startswith("  ") else "") + _escaped(row.name.strip())
        lines.append(" & ".join([name, *(_bold(e, r"\textbf{{{}}}", _escaped, row) for e in row.entries)]) + r" \\")
        before = row.method
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])


def _escaped(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)


COLUMNS = ("method", "objective", "domain", "metric", "score", "mean", "spread", "seeds")


def to_csv(table: Table) -> str:
    """One line for each number, not rounded: method, objective, domain (or "average"), metric, score, mean, spread, seeds.

    The score is what samples are ranked by, see `come.metrics.SCORES`; empty where nothing is ranked. Numbers are in percent,
    except nll (nats) and brier. The spread is the standard deviation over seeds, empty with one; the mean is empty where a
    cell is missing. There are no differences. A name that a spreadsheet would read as a formula gets a single quote in front.

    Example:
        >>> from come.bench.report.tables import Row
        >>> table = Table("", ("Fog",), (Row("tent", "em", (Entry(52.13),), "em"),), (("fog", "accuracy"),))
        >>> print(to_csv(table), end="")
        method,objective,domain,metric,score,mean,spread,seeds
        tent,em,fog,accuracy,,52.13,,1
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _no_formula(value) for name, value in line.items()} for line in _numbers(table))
    return text.getvalue()


def _no_formula(value: str | float | None) -> str | float | None:
    """
    >>> _no_formula("=cmd()"), _no_formula("-1"), _no_formula(-1.0)
    ("'=cmd()", '-1', -1.0)
    """
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t"))
    number = formula and re.fullmatch(r"[-+]?\d+(\.\d*)?([eE][-+]?\d+)?", str(value))
    return f"'{value}" if formula and not number else value


def to_json(table: Table) -> str:
    """The same numbers as `to_csv`, as `{"title": ..., "numbers": [...]}` with null where there is none."""
    return json.dumps({"title": table.title, "numbers": list(_numbers(table))}, indent=1, allow_nan=False) + "\n"


def _numbers(table: Table) -> Iterator[dict[str, str | float | None]]:
    for row in (row for row in table.rows if row.ran_with):
        for (domain, metric), entry in zip(table.keys, row.entries, strict=True):
            if metric == "gain" or (entry is None and row.score):
                continue
            numbers = (None, None, 0) if entry is None else (entry.mean, entry.spread, entry.seeds)
            own = METRICS[metric].score
            score = "" if own is None else own or row.score or table.score
            name = metric.removesuffix(f"_{own}")
            yield dict(zip(COLUMNS, (row.method, row.ran_with, domain, name, score, *numbers), strict=True))
