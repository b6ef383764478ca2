"""Lists what tools/gpu_checks.sh compares: flavour, graph, ONNX file, engine, rows; an engine of "-" is none."""

from __future__ import annotations

import sys
from pathlib import Path

from eagle_graphs.manifest import FILE_NAME, Manifest, manifest_from_json
from eagle_graphs.passes import draft_passes, target_passes


def pairs(manifest: Manifest) -> list[tuple[str, str, str, str, str]]:
    """Each engine with the portable graph of its precision; each portable graph alone where there is none.

    Engines without weights, and those of the package's kernels, whose caches must be bound in place, are left out:
    tools/gpu_checks.py runs them.
    """
    rows = {
        "target": str(max(each.asked for each in target_passes(manifest.profiles, manifest.limits))),
        "draft": str(max(p.asked for p in draft_passes(manifest.profiles, manifest.limits) if p.after == p.rows)),
    }
    portable = {graphs.precision: graphs for graphs in manifest.portable}
    found = []
    for engine in manifest.engines:
        if engine.device == "cuda" and not engine.weights_stripped and engine.kernels != "plugin":
            graphs = portable.get(engine.precision)
            for name in ("target", "draft"):
                onnx = "" if graphs is None else getattr(graphs, name)
                found.append((str(engine.backend), name, onnx, getattr(engine, name), rows[name]))
    if not found:
        found = [
            ("onnxruntime", name, getattr(graphs, name), "-", rows[name])
            for graphs in manifest.portable
            for name in ("target", "draft")
        ]
    return found


if __name__ == "__main__":
    for pair in pairs(manifest_from_json((Path(sys.argv[1]) / FILE_NAME).read_text("utf-8"))):
        print("\t".join(pair))
