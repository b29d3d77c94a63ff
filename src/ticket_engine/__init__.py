"""Labels for tables of support tickets from a small language model: planned, packed, and provable.

Importing the package imports neither torch nor transformers.
"""

from ticket_engine.classifier import classify

__all__ = ["classify"]
