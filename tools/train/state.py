"""Checkpoints of training, and a run's curves."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eagle_graphs import EagleError
from tools.train.loop import Trainer


def save_state(trainer: Trainer, settings: Mapping[str, Any], path: Path) -> None:
    """Writes everything that the rest of the run depends on; an interrupted write leaves the last one as it was."""
    run = trainer.run
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    torch.save(
        {
            "settings": json.dumps(settings),
            "head": trainer.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
            "random": run.random.get_state(),
            "place": (run.tokens, run.epoch, run.batch),
            "history": json.dumps(run.history),
        },
        beside,
    )
    os.replace(beside, path)


def load_state(trainer: Trainer, settings: Mapping[str, Any], path: Path) -> None:
    """Puts a run where it was saved. Raises EagleError where it was begun with other settings, or is damaged."""
    try:
        state = torch.load(path, map_location=trainer.device, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise EagleError(f"{path} cannot be read ({error}): remove it to begin anew") from None
    if "optimizers" not in state:
        raise EagleError(f"{path} was written by another version of this tool: remove it to begin anew")
    found = json.loads(state["settings"])
    for name, value in json.loads(json.dumps(settings)).items():
        if found.get(name) != value:
            raise EagleError(
                f"{path} was begun with {name} {found.get(name)!r}, and this run has {value!r}: continue with the same "
                "options and data, or choose another --out"
            )
    trainer.head.load_state_dict(state["head"])
    run = trainer.run
    for optimizer, own in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(own)
    run.random.set_state(state["random"].cpu())
    run.tokens, run.epoch, run.batch = state["place"]
    run.history = json.loads(state["history"])
