"""The bundle's manifest: what it holds, what it was made from and how it must be run.

Read strictly: a missing, unknown or mistyped field is an error, since a manifest that is half
understood gives wrong text rather than none.
"""

from __future__ import annotations

import itertools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import PurePosixPath
from typing import Any, Literal, TypeVar

from eagle_graphs.errors import EagleError
from eagle_graphs.native_ops import KEY_BLOCK
from eagle_graphs.ports import DTYPES, KVGeometry
from eagle_graphs.profiles import Profile

SCHEMA = 4
FILE_NAME = "manifest.json"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of the bundle, by its path below the bundle's directory."""

    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the target or the head came from."""

    name: str
    """Hub id, or the last part of a local path; never a path of the exporting machine."""
    revision: str | None
    """Commit of a Hub repository; None for local files."""
    files: dict[str, str]
    """SHA-256 of each file that was read, by file name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """The target model."""

    source: Source
    architecture: str
    hidden_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_positions: int
    """Positions that the model was made for."""
    kv: KVGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInfo:
    """The draft head."""

    source: Source
    kind: Literal["eagle1", "eagle3"]
    layout: str
    """Checkpoint layout that was detected."""
    taps: tuple[int, ...]
    """Target features, as indices into Hugging Face's `hidden_states` (k = input of layer k)."""
    position_offset: int
    """Position of the draft row of the target's feature 0."""
    hidden_size: int
    draft_vocab_size: int
    top_k: int
    """Children that the graph returns for a row; a profile may use fewer."""
    kv: KVGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """How far a tree's logits may differ from plain decoding's, measured at export."""

    kind: Literal["bitwise", "near-tie", "statistical", "unmeasured"]
    logit_gap: float
    """Greedy choices can differ only where the two best logits are closer than this."""
    max_logit_difference: float
    """Largest difference seen between a path's logits in a tree and alone."""
    rows: int
    """Rows compared."""

    def sentence(self) -> str:
        """For the user."""
        if self.kind == "unmeasured":
            return "exactness: unmeasured (the engine was built where it was not run)"
        if self.kind == "bitwise":
            what = f"the logits of a path are plain decoding's, bit for bit, over {self.rows} rows"
        else:
            what = (
                f"logits differ from plain decoding's by at most {self.max_logit_difference:.2g} over {self.rows} "
                f"rows, so greedy text can differ only where the two best are closer than {self.logit_gap:.2g}"
            )
        return f"exactness: {self.kind} (measured at export: {what})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Compiled graphs for one backend. Graph files name their weights relative to themselves."""

    backend: Literal["onnxruntime", "tensorrt-rtx", "tensorrt"]
    device: Literal["cpu", "cuda"]
    architectures: tuple[str, ...]
    """GPUs that it runs on, as sm89; none for a CPU."""
    kernels: Literal["stock", "native", "plugin"]
    """Whose attention and quantized products: the backend's own, the library `eagle_graphs.native`, or the kernel of
    `eagle_graphs.plugin`."""
    precision: str
    cache_dtype: str
    """Element type of its caches. All other ports are as `eagle_graphs.ports` has them."""
    weights_stripped: bool
    """Whether its weights are those of the portable graphs of the same precision, to be put in when it is loaded."""
    slots: int
    """Sequences that one call takes (B)."""
    target: str
    """With frozen shapes: optimization profile i is the i-th of `eagle_graphs.passes.target_passes`."""
    draft: str
    """The same, of `draft_passes`."""
    draft_rounds: dict[str, str]
    """By the nodes of a profile whose tree is dynamic: all passes of a round of drafting as one graph."""
    draft_steps: dict[str, tuple[str, ...]]
    """By the nodes of any profile: what stands between the head's passes, `eagle_graphs.draft_steps`."""
    exactness: Exactness

    @property
    def graphs(self) -> tuple[str, ...]:
        """All its files."""
        return (self.target, self.draft, *self.draft_rounds.values(), *itertools.chain(*self.draft_steps.values()))

    @property
    def key_block(self) -> int:
        """Rows of a block of the key caches; 1 where keys are kept row by row."""
        return KEY_BLOCK if self.kernels == "native" else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginGraphs:
    """The graphs with the attention of `eagle_graphs.plugin` in them, which TensorRT alone takes."""

    target: str
    draft: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableGraphs:
    """Graphs in standard ONNX, from which eagle-build makes engines where they are to run."""

    precision: str
    cache_dtype: str
    target: str
    draft: str
    draft_steps: dict[str, tuple[str, ...]]
    """As an engine's."""
    plugin: PluginGraphs | None = None
    """The same graphs over the same weights; None where the export was not asked for them."""

    @property
    def graphs(self) -> tuple[str, ...]:
        """All its files."""
        plugin = () if self.plugin is None else (self.plugin.target, self.plugin.draft)
        return (self.target, self.draft, *itertools.chain(*self.draft_steps.values()), *plugin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes that the graphs and the cache are made for."""

    capacity: int
    """Cache rows that a sequence may commit."""
    prefill_chunk: int
    """Prompt tokens of one prefill pass."""
    buffer_rows: int
    """Rows of the cache buffer: the capacity and room for the largest pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """Tokenizer files in the bundle."""

    tokenizer: str
    """A `tokenizers` JSON file."""
    chat_template: str | None
    """A Jinja template in Hugging Face's dialect; None where the model has none."""
    special_tokens: dict[str, str]
    """Names that the template may use (bos_token, eos_token, ...) and their text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that the runtime needs to know of a bundle."""

    schema: int = SCHEMA
    files: dict[str, FileEntry]
    versions: dict[str, str]
    """Versions of the libraries that made the bundle."""
    target: TargetInfo
    head: HeadInfo
    tokenizer: TokenizerFiles
    profiles: tuple[Profile, ...]
    default_profile: str
    """The fixed profile that was fastest when exporting, a number of nodes or "plain": "auto" starts from it, and draws
    sampled trees of its shape."""
    limits: Limits
    engines: tuple[Engine, ...] = field(default=())
    """Best first: the runtime takes the first one that the machine can run."""
    portable: tuple[PortableGraphs, ...] = field(default=())

    def __post_init__(self) -> None:
        self._check_sizes()
        for path in self.files:
            check_path(path)
        named = [
            self.tokenizer.tokenizer,
            *itertools.chain(*(engine.graphs for engine in self.engines)),
            *itertools.chain(*(portable.graphs for portable in self.portable)),
        ]
        if self.tokenizer.chat_template is not None:
            named.append(self.tokenizer.chat_template)
        for path in named:
            if path not in self.files:
                raise EagleError(f"the manifest names {path!r} but does not list it among its files: export again")
        choices = ["plain", *(str(profile.nodes) for profile in self.profiles)]
        if self.default_profile not in choices:
            raise EagleError(f"the manifest's default profile is {self.default_profile!r}; it has {', '.join(choices)}")

    def _check_sizes(self) -> None:
        parts: dict[str, Any] = {"target": self.target, "head": self.head, "limits": self.limits}
        parts |= {"target.kv": self.target.kv, "head.kv": self.head.kv}
        parts |= {f"engines[{i}]": engine for i, engine in enumerate(self.engines)}
        parts |= {f"portable[{i}]": graphs for i, graphs in enumerate(self.portable)}
        for where, part in parts.items():
            for name, value in ((item.name, getattr(part, item.name)) for item in fields(part)):
                if type(value) is int and value < 1 and name != "position_offset":
                    raise EagleError(f"manifest.{where}.{name} is {value}; expected 1 or more: export the bundle again")
                if name in ("dtype", "cache_dtype") and value not in DTYPES:
                    raise EagleError(f"manifest.{where}.{name} is {value!r}; expected one of {', '.join(DTYPES)}")
        for index, engine in enumerate(self.engines):
            self._check_rounds(f"engines[{index}].draft_rounds", engine.draft_rounds)
            self._check_steps(f"engines[{index}].draft_steps", engine.draft_steps)
            if self.limits.buffer_rows % engine.key_block:
                raise EagleError(
                    f"manifest.limits.buffer_rows is {self.limits.buffer_rows}; expected a multiple of the "
                    f"{engine.key_block} rows of a block in engines[{index}]: export the bundle again"
                )
        for index, graphs in enumerate(self.portable):
            self._check_steps(f"portable[{index}].draft_steps", graphs.draft_steps)
        for profile in self.profiles:
            if profile.top_k > self.head.top_k:
                raise EagleError(
                    f"the manifest's profile {profile.nodes} drafts {profile.top_k} children of a node, its head gives "
                    f"{self.head.top_k}: export the bundle again"
                )

    def _check_rounds(self, where: str, rounds: Mapping[str, str]) -> None:
        dynamic = [str(profile.nodes) for profile in self.profiles if not profile.paths]
        if others := [nodes for nodes in rounds if nodes not in dynamic]:
            raise EagleError(
                f"manifest.{where} has {others[0]!r}; expected sizes of profiles whose tree is dynamic, "
                f"{', '.join(dynamic) or 'of which there are none'}: export the bundle again"
            )

    def _check_steps(self, where: str, steps: Mapping[str, tuple[str, ...]]) -> None:
        depths = {str(profile.nodes): profile.depth for profile in self.profiles}
        for nodes, graphs in steps.items():
            if nodes not in depths:
                raise EagleError(
                    f"manifest.{where} has {nodes!r}; expected sizes of profiles, {', '.join(depths)}: export the "
                    "bundle again"
                )
            if len(graphs) != depths[nodes]:
                raise EagleError(
                    f"manifest.{where}[{nodes!r}] has {len(graphs)} graphs; expected {depths[nodes]}, one for each "
                    "level: export the bundle again"
                )

    def to_json(self) -> str:
        """The manifest as manifest.json holds it."""
        return json.dumps(asdict(self), indent=1) + "\n"


def manifest_from_json(text: str) -> Manifest:
    """The manifest that `text` holds. Raises EagleError where it is not one of this schema."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EagleError(f"{FILE_NAME} is not JSON ({error}): export the bundle again") from None
    if not isinstance(data, dict) or "schema" not in data:
        raise EagleError(f"{FILE_NAME} has no schema number: this is not a bundle of eagle-export")
    if data["schema"] != SCHEMA:
        raise EagleError(
            f"{FILE_NAME} has schema {data['schema']!r}, this version reads schema {SCHEMA}: "
            "export the bundle again, or install the version that made it"
        )
    manifest: Manifest = _decode(Manifest, data, "manifest")
    return manifest


def check_path(path: str) -> None:
    """Raises EagleError unless `path` stays below the bundle's directory, on every system."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or ":" in parts[0]:
        raise EagleError(
            f"the manifest names the file {path!r}, which is not inside the bundle: do not use this bundle"
        )


def _decode(kind: Any, data: Any, where: str) -> Any:
    """`data` from JSON as the type `kind`, checked at every level. Raises EagleError naming the field."""
    if is_dataclass(kind):
        return _decode_fields(kind, _expect(dict, data, where), where)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if data not in args:
            raise EagleError(f"{where} is {data!r}; expected one of {', '.join(map(repr, args))}")
        return data
    if origin is tuple:
        return tuple(_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(_expect(list, data, where)))
    if origin is dict:
        return {key: _decode(args[1], item, f"{where}[{key!r}]") for key, item in _expect(dict, data, where).items()}
    if origin is types.UnionType:  # X | None
        return None if data is None else _decode(args[0], data, where)
    return _expect(kind, data, where)


def _decode_fields(kind: Any, data: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    known = {item.name for item in fields(kind)}
    unknown, missing = data.keys() - known, known - data.keys()
    if unknown or missing:
        found = [f"unknown field {name!r}" for name in sorted(unknown)] + [
            f"no field {name!r}" for name in sorted(missing)
        ]
        raise EagleError(f"{where} has {', '.join(found)}: the bundle was made by another version, export it again")
    return kind(**{name: _decode(hints[name], data[name], f"{where}.{name}") for name in known})


def _expect(kind: type[T], data: Any, where: str) -> T:
    if kind is float and type(data) is int:
        return typing.cast(T, float(data))
    if type(data) is not kind:
        raise EagleError(f"{where} is {type(data).__name__} {str(data)[:40]!r}; expected {kind.__name__}")
    return data
