"""The export, step by step: checkpoint -> trace -> lower -> validate -> bundle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from eagle_calibration.prompts import load_prompts
from eagle_exporter import proof
from eagle_exporter.bundle import file_entries, staged
from eagle_exporter.calibrate import Calibration, calibrate, summary, write_calibration
from eagle_exporter.checkpoint import Checkpoint, find_checkpoint
from eagle_exporter.eagle1 import Eagle1Head
from eagle_exporter.eagle3 import Eagle3Head
from eagle_exporter.engines import write_engines
from eagle_exporter.gpu import Original, build_engines, make_portable
from eagle_exporter.gpu_options import GpuOptions
from eagle_exporter.heads import Head, HeadSpec, Overrides, TargetShape, load_head
from eagle_exporter.parity import LoweredGraph, OutputParity
from eagle_exporter.precision import Quantization, choose_kernels
from eagle_exporter.probe import Answer, read_answers, run_probe
from eagle_exporter.proof import Agreement
from eagle_exporter.quality import measure_quality
from eagle_exporter.report import Report, Steps, versions
from eagle_exporter.target import Target, TargetGraph, load_target, settle
from eagle_exporter.tokenizer import prompt_tokens, save_tokenizer
from eagle_exporter.trace import trace
from eagle_exporter.validate import compare_draft, compare_target
from eagle_exporter.validate_rounds import compare_rounds
from eagle_graphs import (
    EagleError,
    GraphPorts,
    KVGeometry,
    Manifest,
    Profile,
    draft_ports,
    draft_round_ports,
    target_ports,
)
from eagle_graphs.manifest import Engine, Exactness, HeadInfo, Limits, PortableGraphs, TargetInfo
from eagle_graphs.native_ops import KEY_BLOCK
from eagle_graphs.tensorrt.bundle import read_manifest, write_manifest

CHECKED_TOKENS = 32
"""New tokens of a prompt that are compared with torch's and timed, for each profile."""
ANSWERED_AT_ONCE = 8
REPORT = "export-report.json"
CALIBRATION = "calibration.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What to export. Raises EagleError on sizes that cannot be."""

    model: str
    draft: str
    profiles: tuple[Profile, ...]
    out: Path
    capacity: int | None
    """Cache rows; None for 2048 or the model's own limit, whichever is less."""
    prefill_chunk: int | None
    """Prompt tokens of one pass; None for 256 or the capacity, whichever is less."""
    overrides: Overrides = field(default_factory=Overrides)
    """Conventions of the head that the user states."""
    accept_probe: bool = False
    """Export even where the probe speaks against the head."""
    cpu: bool = True
    """Make graphs for ONNX Runtime on the CPU."""
    quantization: Quantization = field(default_factory=Quantization)
    """Of those."""
    gpu: GpuOptions | None = None
    """What to make for GPUs."""

    def limits(self, max_positions: int) -> Limits:
        """The bundle's sizes for a model of so many positions."""
        capacity = min(2048, max_positions) if self.capacity is None else self.capacity
        if not 1 <= capacity <= max_positions:
            raise EagleError(f"--capacity is {capacity}; this model takes 1 to {max_positions} positions")
        chunk = min(256, capacity) if self.prefill_chunk is None else self.prefill_chunk
        if not 1 <= chunk <= capacity:
            raise EagleError(f"--prefill-chunk is {chunk}; expected 1 to the capacity, {capacity}")
        passes = [chunk, *(max(p.nodes, p.draft_rows) for p in self.profiles)]
        blocks = -(-(capacity + max(passes)) // KEY_BLOCK)
        return Limits(capacity=capacity, prefill_chunk=chunk, buffer_rows=blocks * KEY_BLOCK)


def export(options: ExportOptions, steps: Steps) -> Report:
    """Makes the bundle and returns its report. Raises EagleError; then nothing is left behind."""
    how = options.quantization
    kernels, notes = choose_kernels(how) if options.cpu else ((), ())
    with staged(options.out) as directory:
        with steps("load and check"):
            model, draft = find_checkpoint(options.model, what="target"), find_checkpoint(options.draft, what="head")
            target = load_target(model)
            head = load_head(draft, target.config, options.overrides)
            graphs = _Graphs.of(target, head, top_k=max(profile.top_k for profile in options.profiles))
            limits = options.limits(int(target.config.max_position_embeddings))
            notes += settle(target.model, capacity=limits.capacity)
            tokenizer = save_tokenizer(target.tokenizer, directory)
            prompts = prompt_tokens(target.tokenizer, load_prompts(), longest=limits.capacity - CHECKED_TOKENS)
        steps.say(notes)
        with steps("probe the head's conventions"):
            answers = read_answers(target, prompts)
            probe = run_probe(graphs.head, head.spec, TargetShape.of(target.config), answers)
        steps.check_probe(probe, accept=options.accept_probe)
        with steps("trace target with feature taps"):
            neutral = {"target": trace(graphs.target, graphs.target_ports())}
        with steps("trace head"):
            neutral["draft"] = trace(graphs.head, graphs.draft_ports())
        parity: dict[str, list[OutputParity]] = {}
        portable: tuple[PortableGraphs, ...] = ()
        if options.gpu is not None:
            data = options.gpu.calibration_data
            made, parity["portable"] = make_portable(
                directory,
                options.gpu,
                neutral,
                graphs.original(head.spec, options.profiles),
                answers if data is None else _answers(data, target, limits),
                prompts,
                buffer_rows=limits.buffer_rows,
                steps=steps,
            )
            portable = (made,)
        calibration: Calibration = {}
        if options.cpu and how.calibrated:
            with steps("calibrate"):
                given = answers if how.calibration_data is None else _answers(how.calibration_data, target, limits)
                calibration = calibrate(how, neutral, graphs.modules(), head.spec, given)
                write_calibration(directory / CALIBRATION, calibration)
            steps.say([summary(calibration)])
        del answers
        engines: list[Engine] = []
        if options.cpu:
            with steps("lower for ONNX Runtime on the CPU and write"):
                engines = write_engines(directory, neutral, kernels, how.precisions, calibration, options.profiles)
        del neutral
        for index, engine in enumerate(engines):
            with steps(f"compare with torch ({engine.kernels} kernels)"):
                parity[engine.kernels], exactness = _compare(directory, engine, graphs, head, options.profiles, prompts)
            steps.check_parity(parity[engine.kernels], quantized=how.quantized)
            engines[index] = replace(engine, exactness=exactness)
            how.check_exactness(exactness)
        quality = None
        if options.cpu and "target" in how.quantized:
            with steps("measure the quality"):
                quality = measure_quality(
                    target,
                    graphs.target,
                    directory / engines[0].target,
                    graphs.target_ports(engines[0].key_block),
                    native=engines[0].kernels == "native",
                    longest=limits.capacity,
                )

        manifest = Manifest(
            files=file_entries(directory),
            versions=versions(),
            target=_target_info(model, target),
            head=_head_info(draft, head, graphs),
            tokenizer=tokenizer,
            profiles=options.profiles,
            default_profile=proof.PLAIN,
            limits=limits,
            engines=tuple(engines),
            portable=portable,
        )
        write_manifest(directory, manifest)
        names = [proof.PLAIN, *(str(profile.nodes) for profile in options.profiles)]
        proven = prompts[::2]  # half of them, for the export's time
        runs: dict[str, dict[str, Any]] = {}
        agreement: dict[str, Agreement] = {}
        for engine in engines:
            with steps(f"run the bundle ({engine.kernels} kernels)"):
                runs[engine.kernels] = proof.run_bundle(
                    directory,
                    proven,
                    names,
                    kernels=engine.kernels,
                    max_new_tokens=CHECKED_TOKENS,
                    tune=engine == engines[0],  # the one that `auto` takes
                )
                agreement[engine.kernels] = proof.check_greedy(
                    target,
                    proven,
                    runs[engine.kernels],
                    engine.exactness,
                    quantized="target" in how.quantized,
                    max_new_tokens=CHECKED_TOKENS,
                )
        built = [] if options.gpu is None else build_engines(directory, options.gpu, options.out, steps)
        made_in = how if options.cpu or options.gpu is None else options.gpu
        with steps("write the bundle"):
            measured = runs[engines[0].kernels] if engines else {}
            default_profile = proof.fastest_profile(measured) if measured else str(options.profiles[0].nodes)
            report = Report(
                steps=steps.done(),
                probe=probe,
                precision=made_in.precision,
                head_precision=made_in.head_precision,
                parity=parity,
                exactness={engine.kernels: engine.exactness for engine in engines},
                agreement=agreement,
                quality=quality,
                measured={name: run["stats"] for name, run in measured.items()},
                default_profile=default_profile,
                engines=built,
                taps=head.spec.taps,
                head_layout=head.spec.layout,
                notes=notes,
                versions=versions(),
                sizes={path.name: path.stat().st_size for path in sorted(directory.rglob("*.*")) if path.is_file()},
            )
            (directory / REPORT).write_text(json.dumps(report.to_dict(), indent=1) + "\n", "utf-8")
            manifest = replace(read_manifest(directory), files=file_entries(directory), default_profile=default_profile)
            write_manifest(directory, manifest)
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graphs:
    target: nn.Module
    head: nn.Module
    target_kv: KVGeometry
    draft_kv: KVGeometry
    vocab_size: int
    hidden_width: int
    """Of the features, and of the head."""
    top_k: int

    @classmethod
    def of(cls, target: Target, head: Head, *, top_k: int) -> _Graphs:
        spec = head.spec
        module = head_module(head, target, top_k=top_k)
        kv = KVGeometry(layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim)
        return cls(
            target=TargetGraph(target.model, spec.taps, module.fuse_features).eval(),
            head=module,
            target_kv=target.kv,
            draft_kv=kv,
            vocab_size=int(target.config.vocab_size),
            hidden_width=spec.hidden_size,
            top_k=top_k,
        )

    def target_ports(self, key_block: int = 1) -> GraphPorts:
        """Ports of the target's graph with keys in blocks of so many rows."""
        return target_ports(
            self.target_kv, vocab_size=self.vocab_size, feature_width=self.hidden_width, key_block=key_block
        )

    def draft_ports(self, key_block: int = 1) -> GraphPorts:
        """The same of the head's graph."""
        return draft_ports(self.draft_kv, hidden_width=self.hidden_width, top_k=self.top_k, key_block=key_block)

    def draft_round_ports(self, profile: Profile, key_block: int = 1) -> GraphPorts:
        """The same of the graph of a whole round."""
        return draft_round_ports(self.draft_kv, profile, hidden_width=self.hidden_width, key_block=key_block)

    def ports(self) -> dict[str, GraphPorts]:
        """The ports by their graphs' names."""
        return {"target": self.target_ports(), "draft": self.draft_ports()}

    def modules(self) -> dict[str, nn.Module]:
        """The modules by their graphs' names."""
        return {"target": self.target, "draft": self.head}

    def original(self, head: HeadSpec, profiles: Sequence[Profile]) -> Original:
        """All of it, for portable graphs."""
        return Original(
            modules=self.modules(), ports=self.ports(), head=head, vocab_size=self.vocab_size, profiles=profiles
        )


def head_module(head: Head, target: Target, *, top_k: int) -> Eagle1Head | Eagle3Head:
    """The head's module; it shares the target's embedding and LM head where the checkpoint brings none."""
    module = Eagle3Head if head.spec.kind == "eagle3" else Eagle1Head
    return module(
        head,
        cast(nn.Module, target.model.get_input_embeddings()),
        cast(nn.Module, target.model.get_output_embeddings()),
        target_embedding_scale=target.embedding_scale,
        top_k=top_k,
    )


def _answers(data: Path, target: Target, limits: Limits) -> Iterator[Answer]:
    """The target's answers to the prompts that the user gave, a few at a time: their hidden states are large."""
    conversations = load_prompts(data)
    prompts = prompt_tokens(target.tokenizer, conversations, longest=limits.capacity - CHECKED_TOKENS)
    for start in range(0, len(prompts), ANSWERED_AT_ONCE):
        yield from read_answers(target, prompts[start : start + ANSWERED_AT_ONCE])


def _compare(
    directory: Path,
    engine: Engine,
    graphs: _Graphs,
    head: Head,
    profiles: Sequence[Profile],
    prompts: Sequence[Sequence[int]],
) -> tuple[list[OutputParity], Exactness]:
    """How far an engine's graphs are from torch, and how exact its trees are."""
    native = engine.kernels == "native"
    parity, exactness, features = compare_target(
        directory / engine.target,
        graphs.target,
        graphs.target_ports(engine.key_block),
        prompts,
        vocab_size=graphs.vocab_size,
        native=native,
    )
    parity += compare_draft(
        directory / engine.draft,
        graphs.head,
        graphs.draft_ports(engine.key_block),
        prompts,
        features,
        position_offset=head.spec.position_offset,
        native=native,
    )
    parity += compare_rounds(
        LoweredGraph(directory / engine.draft, graphs.draft_ports(engine.key_block), native=native),
        {
            profile: LoweredGraph(
                directory / engine.draft_rounds[str(profile.nodes)],
                graphs.draft_round_ports(profile, engine.key_block),
                native=native,
            )
            for profile in profiles
            if str(profile.nodes) in engine.draft_rounds
        },
        prompts,
        features,
        position_offset=head.spec.position_offset,
    )
    return parity, exactness


def _target_info(checkpoint: Checkpoint, target: Target) -> TargetInfo:
    config = target.config
    return TargetInfo(
        source=checkpoint.source(),
        architecture=type(target.model).__name__,
        hidden_size=int(config.hidden_size),
        vocab_size=int(config.vocab_size),
        eos_token_ids=target.eos_token_ids,
        max_positions=int(config.max_position_embeddings),
        kv=target.kv,
    )


def _head_info(checkpoint: Checkpoint, head: Head, graphs: _Graphs) -> HeadInfo:
    spec = head.spec
    return HeadInfo(
        source=checkpoint.source(),
        kind=spec.kind,
        layout=spec.layout,
        taps=spec.taps,
        position_offset=spec.position_offset,
        hidden_size=spec.hidden_size,
        draft_vocab_size=spec.draft_vocab_size,
        top_k=graphs.top_k,
        kv=graphs.draft_kv,
    )
