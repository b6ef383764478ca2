"""Training of draft heads on one machine: data, head, evaluation, ablations (docs/training.md)."""
