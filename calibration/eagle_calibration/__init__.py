"""What the exporter measures a model on: the prompts that are shipped, or a user's own."""

from eagle_calibration.prompts import load_prompts

__all__ = ["load_prompts"]
