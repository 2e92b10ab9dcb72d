"""The leaderboard: results that others submit, checked, and ranked by protocol."""

from come.bench.board.check import problems, read
from come.bench.board.make import submission
from come.bench.board.schema import Submission, load

__all__ = ["Submission", "load", "problems", "read", "submission"]
