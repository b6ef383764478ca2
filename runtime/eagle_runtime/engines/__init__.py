"""Compiled graphs of each backend, behind one small interface."""

from eagle_runtime.engines.base import Call, Features, Graph, Rows

__all__ = ["Call", "Features", "Graph", "Rows"]
