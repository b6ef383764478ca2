"""The kernels compiled ahead of time, on a machine that needs no GPU: PTX, cubin, and what they use."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from eagle_graphs.plugin import kernels
from eagle_graphs.plugin.launch import (
    Attention,
    attend_constants,
    attend_options,
    combine_constants,
    commit_constants,
    tiles_for,
    tiles_of_height,
)

TARGETS = (80, 89, 90, 120)
"""Compute capabilities that are checked: A100, RTX 40, H100 and RTX 50. Others compile too."""

PTX_VERSION = 87
"""Of CUDA 12.8, the first that knows compute capability 12.0: a driver refuses PTX that is newer than itself."""

DType = Literal["fp16", "bf16"]
Types = Mapping[str, str | None]
"""Type of each parameter, as Triton writes it; None where a call leaves it out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """A kernel for one compute capability. Its parameters are those of the function in `kernels`, in their order,
    without the constants and without what a call leaves out."""

    name: str
    ptx: str
    cubin: bytes
    threads: int
    """Of a program: the launch's block is (threads, 1, 1)."""
    shared: int
    """Bytes of dynamic shared memory."""
    registers: int
    """Of a thread."""
    spilled: int
    """Bytes that a thread stores to memory for want of registers."""


def compile_attend(
    attention: Attention,
    capability: int,
    *,
    block_m: int,
    split_rows: int,
    split: bool,
    sinks: bool = False,
    dtype: DType = "fp16",
) -> CompiledKernel:
    """`kernels.attend` in tiles of `block_m` rows of queries; `split`: it leaves its parts for `combine`."""
    rows = dict.fromkeys(
        ("query", "key", "value", "past_key", "past_value", "present_key", "present_value"), f"*{dtype}"
    )
    types = rows | {
        "words": "*i64",
        "kv_length": "*i64",
        "write_row": "*i64",
        "sinks": f"*{dtype}" if sinks and not split else None,
        "new_rows": "i32",
        "word_count": "i32",
        "capacity": "i32",
        "out": "*fp32" if split else f"*{dtype}",
        "statistics": "*fp32" if split else None,
    }
    tiles = tiles_of_height(attention, block_m)
    return _compile(
        kernels.attend, types, attend_constants(attention, tiles, split_rows), attend_options(tiles), capability
    )


def compile_combine(
    capability: int,
    *,
    query_heads: int,
    head_dim: int,
    sliding_window: int,
    splits: int,
    split_rows: int,
    sinks: bool = False,
    dtype: DType = "fp16",
) -> CompiledKernel:
    """`kernels.combine` for `splits` parts a row."""
    types = {
        "partial": "*fp32",
        "statistics": "*fp32",
        "kv_length": "*i64",
        "sinks": f"*{dtype}" if sinks else None,
        "new_rows": "i32",
        "splits": "i32",
        "out": f"*{dtype}",
    }
    return _compile(
        kernels.combine,
        types,
        combine_constants(query_heads, head_dim, sliding_window, splits=splits, split_rows=split_rows),
        {},
        capability,
    )


def compile_commit(
    kv_heads: int, head_dim: int, capability: int, *, longest_path: int, dtype: DType = "fp16"
) -> CompiledKernel:
    """`kernels.commit_path` for paths of up to `longest_path` rows."""
    types = {
        "path": "*i64",
        "count": "*i64",
        "kv_length": "*i64",
        "slots": "i32",
        "path_width": "i32",
        "rows": "i32",
        "cache": f"*{dtype}",
    }
    return _compile(kernels.commit_path, types, commit_constants(kv_heads, head_dim, longest_path), {}, capability)


def _compile(
    kernel: Any, types: Types, constants: Mapping[str, float], options: Mapping[str, Any], capability: int
) -> CompiledKernel:
    absent = {name: None for name, kind in types.items() if kind is None}
    signature = {name: types.get(name) or "constexpr" for name in kernel.arg_names}
    # Buffers come from cudaMalloc or TensorRT, which align more than this: loads may take 16 bytes at once.
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind.startswith("*")}
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # else the code names files of this machine
        compiled = triton.compile(
            ASTSource(kernel, signature=signature, constexprs={**constants, **absent}, attrs=aligned),
            target=GPUTarget("cuda", capability, 32),
            options={"enable_fp_fusion": True, "ptx_version": PTX_VERSION, **options},
        )
    metadata = compiled.metadata
    assert metadata.global_scratch_size == metadata.profile_scratch_size == 0
    parameters = sum(kind != "constexpr" for kind in signature.values())
    ptx = _without_scratch(compiled.asm["ptx"], parameters)
    cubin, log = _assemble(ptx, capability)
    return CompiledKernel(
        name=metadata.name,
        ptx=ptx,
        cubin=cubin,
        threads=metadata.num_warps * 32,
        shared=metadata.shared,
        registers=_number(r"Used (\d+) registers", log),
        spilled=_number(r"(\d+) bytes spill stores", log),
    )


def _without_scratch(ptx: str, parameters: int) -> str:
    """The kernel with its first `parameters` parameters alone.

    Triton appends two, pointers to scratch memory. These kernels use none, and TensorRT passes nothing for them.
    """
    head, opened, rest = ptx.partition("(")
    listed, closed, body = rest.partition(")")
    kept, dropped = listed.split(",")[:parameters], listed.split(",")[parameters:]
    names = [item.split()[-1] for item in dropped]
    assert len(names) == 2, "Triton's own parameters are not the two of scratch memory"
    assert not any(f"[{name}" in body for name in names), "a kernel uses scratch memory"
    return head + opened + ",".join(kept) + "\n" + closed + body


def _assemble(ptx: str, capability: int) -> tuple[bytes, str]:
    """The cubin of `ptx`, and what ptxas says of it."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={sm_arch_from_capability(capability)}"]
        done = subprocess.run([*command, str(source), "-o", str(target)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ptxas failed for compute capability {capability}:\n{done.stderr}")
        return target.read_bytes(), done.stderr


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"ptxas reports no {pattern}: {text}"
    return int(found[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLine:
    """One kernel of a report."""

    capability: int
    attention: str
    call: str
    kernel: CompiledKernel


def report(
    attentions: Mapping[str, Attention], capabilities: Sequence[int] = TARGETS, rows: Sequence[int] = (1, 16, 60)
) -> list[ReportLine]:
    """What the kernels use for each of `attentions`, by name, with trees of so many `rows`."""
    lines = []
    for capability in capabilities:
        for name, attention in attentions.items():
            calls = {
                f"attend, {new} rows": compile_attend(
                    attention, capability, block_m=tiles_for(attention, new).block_m, split_rows=512, split=True
                )
                for new in rows
            }
            calls["combine, 8 splits"] = compile_combine(
                capability,
                query_heads=attention.query_heads,
                head_dim=attention.head_dim,
                sliding_window=attention.sliding_window,
                splits=8,
                split_rows=512,
            )
            calls["commit, 16 rows"] = compile_commit(
                attention.kv_heads, attention.head_dim, capability, longest_path=16
            )
            lines += [
                ReportLine(capability=capability, attention=name, call=call, kernel=kernel)
                for call, kernel in calls.items()
            ]
    return lines
