"""TensorRT's execution with ONNX Runtime in place of the library and the host in place of the GPU.

Choice of passes, padding, addresses, recording and the order of copies are the runtime's own; what a real engine
computes, and how fast, waits for tools/gpu_checks.sh.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from eagle_graphs import EagleError, draft_ports, static_profile, target_ports
from eagle_graphs.manifest import FILE_NAME, FileEntry, manifest_from_json
from eagle_graphs.passes import draft_passes, target_passes
from eagle_graphs.tensorrt.bundle import frozen_steps
from eagle_runtime import Session
from eagle_runtime.bundle import open_bundle
from eagle_runtime.engines import select
from eagle_runtime.engines.base import Array
from eagle_runtime.engines.memory import HostMemory
from eagle_runtime.engines.select import engine_from_portable
from eagle_runtime.generate import Round
from eagle_runtime.session import DraftingMode
from tests.portable import with_portable_graphs
from tests.standin import STREAMS, tensorrt_standin

PROMPT = "the quick brown fox jumps over"
STATIC = static_profile(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 1), (1, 0, 0)))


class LateMemory(HostMemory):
    """Does what is asked for when it is waited for, as a GPU may, and counts what it is made to do."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = self.recorded = self.replayed = self.fetched = 0
        self._queue: list[Callable[[], object]] = []
        self.stream = len(STREAMS)
        STREAMS[self.stream] = self.do

    def do(self, work: Callable[[], object]) -> None:
        """Work of the device, in its turn."""
        self._queue.append(work)

    def upload(self, address: int, array: Array) -> None:
        self.do(partial(super().upload, address, array))

    def download(self, array: Array, address: int) -> None:
        self.do(partial(self._fetch, array, address))

    def _fetch(self, array: Array, address: int) -> None:
        self.fetched += array.nbytes
        super().download(array, address)

    def copy_rows(self, target: int, source: int, *, pitch: int, width: int, height: int) -> None:
        self.do(partial(super().copy_rows, target, source, pitch=pitch, width=width, height=height))

    def clear(self, address: int, size: int) -> None:
        self.do(partial(super().clear, address, size))

    def synchronize(self) -> None:
        self.waits += 1
        for work in self._queue:
            work()
        self._queue.clear()

    def record(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        waiting, self._queue = self._queue, []
        enqueue()
        recorded, self._queue = self._queue, waiting

        def replay() -> None:
            self.replayed += 1
            self._queue += recorded

        return replay


@pytest.fixture(scope="module")
def bundle(tiny_bundle: Path, tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle, a static profile added, with an engine of the portable graphs only the stand-in can read."""
    place = tmp_path_factory.mktemp("trt")
    shutil.copytree(tiny_bundle, place / "static")
    change_manifest(place / "static", lambda data: data["profiles"].append(asdict(STATIC)))
    out = with_portable_graphs(place / "static", tiny_target, tiny_head, place / "bundle")
    manifest = manifest_from_json((out / FILE_NAME).read_text())
    engine = engine_from_portable(manifest.portable[0])
    names = {}
    for graph in ("target", "draft"):
        names[graph] = f"portable/{graph}.engine"
    steps = {nodes: [name.replace(".onnx", ".engine") for name in own] for nodes, own in engine.draft_steps.items()}
    written = [*names.values(), *itertools.chain(*steps.values())]
    for name in written:
        (out / name).write_bytes(Path(name).stem.encode())
    files = manifest.files | {name: entry_of(out / name) for name in written}
    engine = replace(engine, backend="tensorrt-rtx", draft_steps=steps, **names)
    data = asdict(replace(manifest, files=files, engines=(*manifest.engines, engine)))
    (out / FILE_NAME).write_text(json.dumps(data))
    return out


def entry_of(path: Path) -> FileEntry:
    return FileEntry(size=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


Engines = dict[bytes, tuple[Path, list[dict[str, tuple[int, ...]]]]]


@pytest.fixture(scope="module")
def engines(bundle: Path) -> Engines:
    """What is behind the bundle's engine files."""
    manifest = manifest_from_json((bundle / FILE_NAME).read_text())
    limits, head, target = manifest.limits, manifest.head, manifest.target
    ports = {
        "target": target_ports(target.kv, vocab_size=target.vocab_size, feature_width=head.hidden_size),
        "draft": draft_ports(head.kv, hidden_width=head.hidden_size, top_k=head.top_k),
    }
    passes = {
        "target": target_passes(manifest.profiles, limits),
        "draft": draft_passes(manifest.profiles, limits),
    }
    engines: Engines = {
        name.encode(): (
            bundle / "portable" / f"{name}.onnx",
            [
                {port.name: port.shape({"B": 1, "C": limits.buffer_rows, **each.sizes}) for port in ports[name].inputs}
                for each in passes[name]
            ],
        )
        for name in ("target", "draft")
    }
    for name, frozen in frozen_steps(manifest, manifest.portable[0]).items():
        shapes = {port.name: port.shape({}) for port in frozen.ports.inputs}
        engines[Path(name).stem.encode()] = bundle / name, [shapes]
    return engines


def open_with(bundle: Path, standin: Any, drafting: DraftingMode = "compiled") -> tuple[Session, LateMemory]:
    memory = LateMemory()
    with playing(standin):
        session = Session(
            open_bundle(bundle), profile="8", threads=None, kernels="auto", drafting=drafting, memory=memory
        )
    return session, memory


@contextmanager
def playing(standin: Any) -> Iterator[None]:
    """With the stand-in as the only library that is installed."""
    with (
        mock.patch.object(select, "import_tensorrt", return_value=standin),
        mock.patch("eagle_runtime.session.installed_backends", return_value={"tensorrt-rtx"}),
    ):
        yield


@pytest.fixture
def opened(bundle: Path, engines: Engines) -> Iterator[Callable[[], tuple[Session, LateMemory]]]:
    standin = tensorrt_standin(engines)
    with playing(standin):
        yield lambda: open_with(bundle, standin)


def test_frozen_passes_give_the_text_of_open_shapes_with_onnx_runtime_for_tensorrt(
    bundle: Path, opened: Callable[[], tuple[Session, LateMemory]]
) -> None:
    session, _ = opened()
    with session, Session.open(bundle, profile="8", kernels="stock") as cpu:
        assert session.engine.backend == "tensorrt-rtx"
        for profile in ("plain", "4", "9", "16", "auto"):
            options = {"profile": profile, "max_new_tokens": 20, "ignore_eos": True}
            assert session.generate(PROMPT, **options).token_ids == cpu.generate(PROMPT, **options).token_ids
        options = {"max_new_tokens": 12, "temperature": 0.9, "seed": 5}
        assert session.generate(PROMPT, **options).token_ids == cpu.generate(PROMPT, **options).token_ids


@pytest.mark.parametrize("profile", ["4", "8", "9", "16"])
def test_a_round_waits_once_and_is_recorded_once_with_onnx_runtime_for_tensorrt(
    opened: Callable[[], tuple[Session, LateMemory]], profile: str
) -> None:
    session, memory = opened()
    options = {"profile": profile, "max_new_tokens": 24, "ignore_eos": True}
    with session:
        session.generate(PROMPT, **options)
        session.reset()
        session.generate(PROMPT, **options)
        memory.waits = memory.recorded = memory.replayed = 0
        session.reset()
        answer = session.generate(PROMPT, **options)
        assert memory.recorded == 0, "a shape was recorded twice"
        prompt = math.ceil(answer.stats.prompt_tokens / session.bundle.manifest.limits.prefill_chunk)
        assert memory.waits == memory.replayed == prompt + answer.stats.rounds


@pytest.mark.parametrize("drafting", ["compiled", "stepwise"])
def test_all_ways_of_asking_give_the_host_s_text_with_onnx_runtime_for_tensorrt(
    tiny_bundle: Path, bundle: Path, engines: Engines, drafting: DraftingMode
) -> None:
    standin = tensorrt_standin(engines)
    options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    with playing(standin), Session.open(tiny_bundle, profile="8", kernels="stock") as cpu:
        session, _ = open_with(bundle, standin, drafting=drafting)
        for more in (
            {"profile": "8"},
            {"profile": "lookup"},
            {"profile": "auto"},
            {"profile": "8", "logprobs": 2},
            {"profile": "16", "temperature": 0.9, "seed": 2},
            {"profile": "4", "temperature": 1.0, "seed": 2, "verify_mode": "sampled"},
        ):
            found, expected = (each.generate(PROMPT, **options, **more) for each in (session, cpu))
            assert found.token_ids == expected.token_ids, more
            if "logprobs" in more:
                assert [each.logprob for each in found.logprobs] == pytest.approx(
                    [each.logprob for each in expected.logprobs], abs=1e-4
                )
        session.close()


@pytest.mark.parametrize("profile", ["4", "8", "9", "16"])
def test_a_compiled_round_drafts_the_trees_of_single_passes_with_onnx_runtime_for_tensorrt(
    bundle: Path, engines: Engines, profile: str
) -> None:
    """Texts are the target's with any tree: only the trees tell that a round drafts as it should."""
    standin, trees = tensorrt_standin(engines), []
    with playing(standin):
        for drafting in ("compiled", "stepwise"):
            session, _ = open_with(bundle, standin, drafting)
            rounds = list[Round]()
            with session:
                session.generate(PROMPT, profile=profile, max_new_tokens=24, ignore_eos=True, on_round=rounds.append)
            trees.append([(each.tree.tokens.tolist(), each.tree.parents.tolist()) for each in rounds])
    assert trees[0] == trees[1]


def test_nothing_of_a_pass_that_failed_is_left_after_a_reset_with_onnx_runtime_for_tensorrt(
    opened: Callable[[], tuple[Session, LateMemory]],
) -> None:
    session, memory = opened()
    options = {"profile": "8", "max_new_tokens": 16, "ignore_eos": True}
    with session:
        expected = session.generate(PROMPT, **options).token_ids
        state = session._state
        for slot in (state.verifier._slot, state.drafter._slot):
            pool = slot.pool
            ctypes.memset(pool.address, 0xFF, pool.slots * pool.slot_size)  # NaN
        memory._held[state.drafter._features._ring].fill(0xFF)
        session.reset()
        assert session.generate(PROMPT, **options).token_ids == expected


def test_an_engine_that_cannot_be_opened_leaves_nothing_with_onnx_runtime_for_tensorrt(
    bundle: Path, engines: Engines
) -> None:
    standin = tensorrt_standin({data: own for data, own in engines.items() if data != b"draft"})
    memory = LateMemory()
    with playing(standin), pytest.raises(EagleError, match=r"cannot load draft\.engine"):
        Session(open_bundle(bundle), profile="8", threads=None, kernels="auto", drafting="compiled", memory=memory)
    assert not memory._held


def test_a_greedy_round_fetches_the_tree_and_what_follows_its_nodes_with_onnx_runtime_for_tensorrt(
    opened: Callable[[], tuple[Session, LateMemory]],
) -> None:
    session, memory = opened()
    with session:
        session.generate(PROMPT, profile="8", max_new_tokens=8, ignore_eos=True)
        start = memory.fetched
        answer = session.generate(PROMPT, profile="8", max_new_tokens=24, ignore_eos=True)
        tree = 8 * (8 + 8 + 4 + 8 + 8)  # tokens, parents, values, depths, mask
        found = 8 + 1  # likeliest token, whether finite
        assert memory.fetched - start == answer.stats.rounds * (tree + 8 * found) + found, "the first one: the prompt's"


def test_sampling_fetches_the_logits_of_the_nodes_walked_on_alone_with_onnx_runtime_for_tensorrt(
    opened: Callable[[], tuple[Session, LateMemory]],
) -> None:
    session, memory = opened()
    with session:
        fetched, walked, row = [], [], 4 * session.bundle.manifest.target.vocab_size
        options = {"profile": "8", "max_new_tokens": 24, "ignore_eos": True, "seed": 3}
        for temperature in (0.0, 1.0):
            session.reset()
            start, rounds = memory.fetched, list[Round]()
            session.generate(PROMPT, temperature=temperature, on_round=rounds.append, **options)
            fetched.append(memory.fetched - start - 360 * len(rounds))
            walked.append(sum(len(each.walk.path) for each in rounds) + 1)
        assert fetched[1] == fetched[0] + walked[1] * row


@pytest.mark.parametrize("profile", ["4", "8", "16"])
def test_sampled_trees_have_passes_of_their_own_with_onnx_runtime_for_tensorrt(
    tiny_bundle: Path, opened: Callable[[], tuple[Session, LateMemory]], profile: str
) -> None:
    session, _ = opened()
    options = {"max_new_tokens": 24, "temperature": 1.0, "seed": 1, "verify_mode": "sampled", "profile": profile}
    with session, Session.open(tiny_bundle, profile=profile, kernels="stock") as cpu:
        assert session.generate(PROMPT, **options).token_ids == cpu.generate(PROMPT, **options).token_ids


def test_an_engine_that_cannot_be_loaded_is_refused_in_one_line_with_onnx_runtime_for_tensorrt(bundle: Path) -> None:
    with pytest.raises(EagleError, match=r"standin 0 cannot load target.engine: the magic tag is another one"):
        open_with(bundle, tensorrt_standin({}))


@pytest.fixture
def stripped(bundle: Path, tmp_path: Path) -> Path:
    """The bundle with engines that have no weights."""
    out = tmp_path / "bundle"
    shutil.copytree(bundle, out)
    change_manifest(out, lambda data: data["engines"][-1].update(weights_stripped=True))
    return out


def change_manifest(bundle: Path, edit: Callable[[Any], object]) -> None:
    data = json.loads((bundle / FILE_NAME).read_text())
    edit(data)
    (bundle / FILE_NAME).write_text(json.dumps(data))


def test_an_engine_without_weights_is_given_the_bundle_s_with_onnx_runtime_for_tensorrt(
    opened: Callable[[], tuple[Session, LateMemory]], stripped: Path, engines: Engines
) -> None:
    options = {"max_new_tokens": 12, "ignore_eos": True}
    session, _ = opened()
    refitted, _ = open_with(stripped, tensorrt_standin(engines, stripped=(b"target", b"draft")))
    with session, refitted:
        assert refitted.engine.weights_stripped
        assert refitted.fallback is None
        assert refitted.generate(PROMPT, **options).token_ids == session.generate(PROMPT, **options).token_ids


def test_weights_that_are_missing_are_named_with_onnx_runtime_for_tensorrt(stripped: Path, engines: Engines) -> None:
    """The head's graph in the target's place: it has none of the target's weights but those that are named alike."""
    target, draft = (stripped / "portable" / f"{name}.onnx" for name in ("target", "draft"))
    target.write_bytes(draft.read_bytes())
    change_manifest(stripped, lambda data: data["files"].update({"portable/target.onnx": asdict(entry_of(target))}))
    with pytest.raises(EagleError) as refused:
        open_with(stripped, tensorrt_standin(engines, stripped=(b"target", b"draft")))
    message = str(refused.value)
    assert re.search(
        r"standin 0 cannot put the weights of \S+/portable/target.onnx into its engine: "
        r"weights are missing: (\S+, ){3}\S+ and \d+ more "
        r"\(Only successfully refitted some weights, \d+ are left\); build it again with eagle-build",
        message,
    ), message


def test_the_library_s_reason_is_told_with_onnx_runtime_for_tensorrt(
    stripped: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin = tensorrt_standin(engines, stripped=(b"target", b"draft"))
    monkeypatch.setattr(standin.Refitter, "refit_cuda_engine", lambda self: False)
    with pytest.raises(EagleError, match=r"into its engine: it gives no reason; build it again"):
        open_with(stripped, standin)


def test_an_engine_that_has_weights_takes_none_with_onnx_runtime_for_tensorrt(stripped: Path, engines: Engines) -> None:
    with pytest.raises(EagleError, match=r"engine of target.onnx has no weights; it has: build it again"):
        open_with(stripped, tensorrt_standin(engines))
