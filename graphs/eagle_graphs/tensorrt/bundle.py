"""Engines into a bundle: built from its portable graphs beside what is there, then named in its manifest.

Until the manifest is replaced, in one step, the bundle is what it was.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from eagle_graphs.draft_steps import draft_step_ports
from eagle_graphs.errors import EagleError
from eagle_graphs.manifest import (
    FILE_NAME,
    Engine,
    Exactness,
    FileEntry,
    Manifest,
    PluginGraphs,
    PortableGraphs,
    manifest_from_json,
)
from eagle_graphs.passes import STEP, Pass, draft_passes, target_passes
from eagle_graphs.ports import GraphPorts, draft_ports, target_ports
from eagle_graphs.tensorrt.build import BuildLog, BuildOptions, Progress, build_engine
from eagle_graphs.tensorrt.library import Attention, import_tensorrt
from eagle_graphs.tensorrt.report import EngineReport, report_from_engine

REPORT = "report.json"
"""Beside the engines: their `EngineReport`s."""
UNMEASURED = Exactness(kind="unmeasured", logit_gap=0.0, max_logit_difference=0.0, rows=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A graph's ports and the passes that its engine is built for."""

    ports: GraphPorts
    passes: tuple[Pass, ...]


def frozen_graphs(manifest: Manifest, cache_dtype: str) -> dict[str, Frozen]:
    """The graphs "target" and "draft" as engines have them."""
    target, head = manifest.target, manifest.head
    return {
        "target": Frozen(
            ports=target_ports(
                replace(target.kv, dtype=cache_dtype), vocab_size=target.vocab_size, feature_width=head.hidden_size
            ),
            passes=target_passes(manifest.profiles, manifest.limits),
        ),
        "draft": Frozen(
            ports=draft_ports(replace(head.kv, dtype=cache_dtype), hidden_width=head.hidden_size, top_k=head.top_k),
            passes=draft_passes(manifest.profiles, manifest.limits),
        ),
    }


def frozen_steps(manifest: Manifest, portable: PortableGraphs) -> dict[str, Frozen]:
    """The same of the portable graphs' steps of drafting, by their files."""
    profiles = {str(profile.nodes): profile for profile in manifest.profiles}
    head = manifest.head
    return {
        name: Frozen(ports=ports, passes=(STEP,))
        for nodes, names in portable.draft_steps.items()
        for name, ports in zip(
            names,
            draft_step_ports(profiles[nodes], hidden_width=head.hidden_size, top_k=head.top_k),
            strict=True,
        )
    }


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the bundle. Raises EagleError where there is none."""
    try:
        return manifest_from_json((directory / FILE_NAME).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise EagleError(f"{directory} is no bundle ({error}): make one with eagle-export --portable") from None


def choose_portable(manifest: Manifest, precision: str | None) -> PortableGraphs:
    """The portable graphs in `precision`, or the only ones. Raises EagleError where there is no such choice."""
    if not manifest.portable:
        raise EagleError("the bundle has no portable graphs to build from: export it with --portable")
    held = {graphs.precision: graphs for graphs in manifest.portable}
    if precision is None and len(held) == 1:
        return manifest.portable[0]
    if precision not in held:
        found = "none was named" if precision is None else f"found {precision!r}"
        raise EagleError(f"--precision is one of the bundle's portable graphs: {', '.join(held)}; {found}")
    return held[precision]


def graphs_for(portable: PortableGraphs, attention: Attention) -> PortableGraphs | PluginGraphs:
    """The graphs of target and head with this attention. Raises EagleError where the bundle has none with plugins."""
    if attention == "native":
        return portable
    if portable.plugin is None:
        raise EagleError(
            f"--attention plugin: the bundle's portable graphs in {portable.precision} are without plugins; export it "
            "with --portable --attention plugin, or build with --attention native"
        )
    return portable.plugin


def add_engines(
    directory: Path, portable: PortableGraphs, options: BuildOptions, *, progress: Progress, log: Path
) -> list[EngineReport]:
    """Builds the engines of target and head from the bundle's portable graphs and adds them to it.

    Engines of the same backend, precision and attention are replaced.

    Args:
        directory: the bundle.
        portable: which of its graphs.
        options: how to build.
        progress: is told how far it is.
        log: where the library's words are kept if it fails.

    Raises:
        EagleError: a file of the bundle is damaged or missing, or the library refuses; then the bundle is as it was.
    """
    manifest, source = read_manifest(directory), graphs_for(portable, options.attention)
    graphs = {"target": source.target, "draft": source.draft}
    steps = frozen_steps(manifest, portable)
    graphs |= {Path(name).stem: name for name in steps}
    frozen = frozen_graphs(manifest, portable.cache_dtype) | {Path(name).stem: own for name, own in steps.items()}
    plain = replace(options, strip_weights=False, plugin_gpu=None)  # for steps, which have neither
    below = {Path(name).parent.as_posix() for name in graphs.values()}
    _check_files(directory, manifest, [name for name in manifest.files if Path(name).parent.as_posix() in below])
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=directory))
    try:
        reports = []
        for name, own in frozen.items():
            said, is_step = BuildLog(), own.passes == (STEP,)
            try:
                built = build_engine(
                    directory / graphs[name],
                    building / f"{name}.engine",
                    own.ports,
                    own.passes,
                    plain if is_step else options,
                    capacity=manifest.limits.buffer_rows,
                    progress=progress,
                    log=said,
                )
            except EagleError as error:
                if not said.messages:
                    raise
                said.write(log)
                raise EagleError(f"{error} (the whole log: {log})") from None
            if not is_step:
                reports.append(report_from_engine(name, own.passes, built))
        text = json.dumps([report.to_dict() for report in reports], indent=1) + "\n"
        (building / REPORT).write_text(text, "utf-8")
        _put_in_place(directory, manifest, portable, options, building)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return reports


def _put_in_place(
    directory: Path, manifest: Manifest, portable: PortableGraphs, options: BuildOptions, building: Path
) -> None:
    stem = f"{options.backend}-{portable.precision}" + ("-plugin" if options.attention == "plugin" else "")
    name = next(n for n in _names(stem) if not (directory / n).exists())
    building.chmod(0o755)
    building.rename(directory / name)
    engine = Engine(
        backend=options.backend,
        device="cuda",
        architectures=options.architectures if options.plugin_gpu is None else (options.plugin_gpu.architecture,),
        kernels="stock" if options.attention == "native" else "plugin",
        precision=portable.precision,
        cache_dtype=portable.cache_dtype,
        weights_stripped=options.strip_weights,
        slots=1,
        target=f"{name}/target.engine",
        draft=f"{name}/draft.engine",
        draft_rounds={},
        draft_steps={
            nodes: tuple(f"{name}/{Path(step).stem}.engine" for step in steps)
            for nodes, steps in portable.draft_steps.items()
        },
        exactness=UNMEASURED,
    )
    kind = (engine.backend, engine.precision, engine.kernels)
    replaced = [e for e in manifest.engines if (e.backend, e.precision, e.kernels) == kind]
    old = {Path(e.target).parent.as_posix() for e in replaced}
    files = {path: entry for path, entry in manifest.files.items() if Path(path).parent.as_posix() not in old}
    for path in sorted((directory / name).iterdir()):
        files[f"{name}/{path.name}"] = FileEntry(size=path.stat().st_size, sha256=_sha256(path))
    trt = import_tensorrt(options.backend)
    kept = tuple(e for e in manifest.engines if e not in replaced)
    write_manifest(
        directory,
        replace(
            manifest,
            files=files,
            versions=manifest.versions | {options.backend: str(trt.__version__)},
            engines=(engine, *kept),
        ),
    )
    for below in old:
        shutil.rmtree(directory / below, ignore_errors=True)


def remove_portable(directory: Path) -> None:
    """Takes the portable graphs out of a bundle."""
    manifest = read_manifest(directory)
    below = {Path(graphs.target).parent.as_posix() for graphs in manifest.portable}
    files = {path: entry for path, entry in manifest.files.items() if Path(path).parent.as_posix() not in below}
    write_manifest(directory, replace(manifest, files=files, portable=()))
    for path in below:
        shutil.rmtree(directory / path)


def log_path(bundle: Path, backend: str) -> Path:
    """Where the library's words are kept when a build fails: beside the bundle."""
    bundle = bundle.absolute()
    return bundle.parent / f"{bundle.name}.{backend}.log"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Puts it in the place of the bundle's in one step."""
    new = directory / f".{FILE_NAME}.new"
    new.write_text(manifest.to_json(), "utf-8")
    os.replace(new, directory / FILE_NAME)


def _names(stem: str) -> Iterable[str]:
    return itertools.chain([stem], (f"{stem}.{number}" for number in itertools.count(2)))


def _check_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    for name in names:
        path, entry = directory / name, manifest.files[name]
        if not path.is_file() or path.stat().st_size != entry.size or _sha256(path) != entry.sha256:
            raise EagleError(
                f"the bundle's file {path} is missing or not what its manifest says: copy the bundle again, or export "
                "it again"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
