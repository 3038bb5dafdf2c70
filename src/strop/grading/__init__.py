"""Outcome from evidence: which changes are graded, where and how they run, what the verdict is, and rules that name what was tried."""
