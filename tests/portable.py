"""A bundle with portable graphs beside its own."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import onnx_ir as ir

from eagle_exporter.checkpoint import find_checkpoint
from eagle_exporter.gpu import write_steps
from eagle_exporter.heads import Overrides, load_head
from eagle_exporter.pipeline import head_module
from eagle_exporter.target import TargetGraph, load_target, settle
from eagle_exporter.trace import trace
from eagle_graphs import draft_ports, target_ports
from eagle_graphs.lowering.standard import lower_for_standard_onnx
from eagle_graphs.manifest import FILE_NAME, manifest_from_json

DTYPES = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16}


def with_portable_graphs(bundle: Path, target: Path, head: Path, out: Path, *, cache_dtype: str = "float32") -> Path:
    """A copy of `bundle`, made of these two, at `out` with portable graphs for one of its own cache types."""
    shutil.copytree(bundle, out)
    manifest = manifest_from_json((out / FILE_NAME).read_text())
    loaded = load_target(find_checkpoint(str(target), what="target"))
    module = head_module(
        load_head(find_checkpoint(str(head), what="head"), loaded.config, Overrides()),
        loaded,
        top_k=manifest.head.top_k,
    )
    settle(loaded.model, capacity=manifest.limits.capacity)
    width = manifest.head.hidden_size
    graphs = {
        "target": trace(
            TargetGraph(loaded.model, manifest.head.taps, module.fuse_features).eval(),
            target_ports(manifest.target.kv, vocab_size=manifest.target.vocab_size, feature_width=width),
        ),
        "draft": trace(module.eval(), draft_ports(manifest.head.kv, hidden_width=width, top_k=manifest.head.top_k)),
    }
    (out / "portable").mkdir()
    data = json.loads((out / FILE_NAME).read_text())
    entry = {"precision": "fp32", "cache_dtype": cache_dtype, "plugin": None}
    for name, graph in graphs.items():
        lower_for_standard_onnx(graph, capacity=manifest.limits.buffer_rows, dtype=DTYPES[cache_dtype])
        entry[name] = f"portable/{name}.onnx"
        ir.save(graph, out / entry[name])
    ports = draft_ports(manifest.head.kv, hidden_width=width, top_k=manifest.head.top_k)
    entry["draft_steps"] = write_steps(out, "portable", manifest.profiles, ports)
    for path in (out / "portable").iterdir():
        data["files"][f"portable/{path.name}"] = {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
    data["portable"] = [entry]
    (out / FILE_NAME).write_text(json.dumps(data))
    return out
