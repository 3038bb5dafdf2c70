"""The cost book: what a run used, by episode, step and phase."""

from strop.ledger.book import CostBook, Meter

__all__ = ["CostBook", "Meter"]
