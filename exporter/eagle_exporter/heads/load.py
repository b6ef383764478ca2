"""From a checkpoint to a head: read, detect, understand, check; then either a head or every reason against it."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PretrainedConfig

from eagle_exporter.checkpoint import Checkpoint
from eagle_exporter.heads.checks import (
    draft_to_target,
    optional_shapes,
    required_shapes,
    sharing_problems,
    tensor_problems,
)
from eagle_exporter.heads.detect import in_checkpoint_name, in_module_names, read_layout
from eagle_exporter.heads.files import read_tensors
from eagle_exporter.heads.source import Source, tap_problems
from eagle_exporter.heads.spec import UNKNOWN, Head, HeadSpec, Overrides, Reading, TargetShape
from eagle_graphs import EagleError

_KIND_NAMES = {"eagle1": "an EAGLE-1/2 head", "eagle3": "an EAGLE-3 head"}


def load_head(checkpoint: Checkpoint, target: PretrainedConfig, overrides: Overrides | None = None) -> Head:
    """Reads, detects and checks a head for `target`. Raises EagleError with every reason against it."""
    reading = read_head(checkpoint, TargetShape.of(target), overrides)
    if reading.problems or reading.spec is None:
        raise EagleError(f"head: {'; '.join(reading.problems)}")
    spec, ids = reading.spec, reading.draft_to_target
    return Head(
        spec=spec,
        tensors={name: tensor.float() for name, tensor in reading.tensors.items()},
        draft_to_target=torch.arange(spec.draft_vocab_size) if ids is None else ids,
    )


def read_head(checkpoint: Checkpoint, target: TargetShape | None, overrides: Overrides | None = None) -> Reading:
    """The head as far as it can be understood; without a target, what depends on one is left open.

    Raises EagleError only where there is nothing to understand: files that are missing or damaged.
    """
    if checkpoint.gguf_file is not None:
        raise EagleError(f"head: {checkpoint.gguf_file} is a GGUF file; name a directory with safetensors files")
    config, tensors = checkpoint.config(), read_tensors(checkpoint.directory)
    layout = read_layout(tensors, config)
    if layout is None:
        found = ", ".join(sorted(tensors)[:6])
        problem = (
            f"{checkpoint.name} is no EAGLE head of a known layout (SafeAILab EAGLE-1/2/3, SpecForge, speculators, "
            f"ModelOpt, AngelSlim); found {found}, ..."
        )
        return Reading(tensors=tensors, problems=[problem])
    read, midlayer = layout
    source = Source(tensors=in_module_names(tensors, midlayer=midlayer), config=config, target=target)
    offsets, membership = source.tensors.pop("d2t", None), source.tensors.pop("t2d", None)
    spec = _overridden(read(source), overrides or Overrides(), source)
    reading = Reading(spec=spec, tensors=source.tensors, problems=source.problems)
    vocab = target.vocab_size if target is not None else UNKNOWN
    reading.draft_to_target = draft_to_target(offsets, membership, spec.draft_vocab_size, vocab, reading.problems)
    reading.problems += tensor_problems(
        reading.tensors,
        required_shapes(spec, target.hidden_size if target is not None else UNKNOWN),
        optional_shapes(spec, vocab),
        lambda name: in_checkpoint_name(name, midlayer=midlayer),
        what=_KIND_NAMES[spec.kind],
    )
    if target is not None:
        reading.problems += sharing_problems(spec, target)
    return reading


def _overridden(spec: HeadSpec, overrides: Overrides, source: Source) -> HeadSpec:
    """The spec with what the user states instead of the checkpoint. Raises EagleError on what cannot be."""
    if overrides.taps is not None:
        if spec.kind == "eagle1":
            raise EagleError("--taps is for EAGLE-3 heads; an EAGLE-1/2 head reads what the LM head reads")
        if spec.taps and len(overrides.taps) != len(spec.taps):
            raise EagleError(f"--taps names {len(overrides.taps)} hidden states; this head takes {len(spec.taps)}")
        if problems := tap_problems(overrides.taps, source.target):
            raise EagleError(f"--taps: {problems[0]}")
        source.problems[:] = [p for p in source.problems if p not in tap_problems(spec.taps, source.target)]
        spec = replace(spec, taps=overrides.taps)
    if overrides.rope_theta is not None:
        if not 0 < overrides.rope_theta < float("inf"):
            raise EagleError(f"--rope-theta is {overrides.rope_theta:g}; expected a positive number")
        spec = replace(spec, rope_parameters=spec.rope_parameters | {"rope_theta": overrides.rope_theta})
    if overrides.position_offset is not None:
        spec = replace(spec, position_offset=overrides.position_offset)
    if overrides.scaled_embedding is not None:
        spec = replace(spec, scaled_embedding=overrides.scaled_embedding)
    return spec
