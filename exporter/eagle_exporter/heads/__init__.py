"""Draft-head checkpoints: which layout a checkpoint has, whether it is whole, and what it means.

A layout is detected from tensor names, shapes and config together, never from one name, and whatever is missing,
unknown or of the wrong shape refuses the head: a head that is loaded wrongly still "works", at an accepted length
of 1. Each family has a file of its own, which turns the checkpoint's config into one `HeadSpec`; tensors get the
names of `eagle_exporter.eagle1` and `eagle3`.
"""

from eagle_exporter.heads.load import load_head, read_head
from eagle_exporter.heads.spec import Head, HeadSpec, Overrides, Reading, TargetShape, Tensors

__all__ = ["Head", "HeadSpec", "Overrides", "Reading", "TargetShape", "Tensors", "load_head", "read_head"]
