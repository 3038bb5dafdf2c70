"""Outcome from evidence: which changes are graded, where and how they run, what the verdict is, and rules that name what was tried."""

from strop.grading.regrade import Regrade, regrade
from strop.grading.repair import GradingLimits, RepairGrader
from strop.grading.table import RULES, Rule

__all__ = ["RULES", "GradingLimits", "Regrade", "RepairGrader", "Rule", "regrade"]
