"""Compiled graphs of each backend, behind one small interface."""

from eagle_runtime.engines.base import Call, Graph

__all__ = ["Call", "Graph"]
