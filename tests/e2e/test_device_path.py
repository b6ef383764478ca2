"""The path of a GPU, its device played by the host: portable graphs in ONNX Runtime over a device's pool and buffers.

What only a GPU can show, CUDA's provider and its kernels, waits for tools/gpu_checks.sh; all else of the path is here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_runtime import Session
from eagle_runtime.bundle import open_bundle
from eagle_runtime.engines.memory import HostMemory
from tests.portable import with_portable_graphs

PROMPTS = ["the quick brown fox", "jumps over", "and then the other one, which is longer than a chunk of the prefill"]


@pytest.fixture(scope="module", params=["float32", "float16"])
def portable(
    request: pytest.FixtureRequest,
    tiny_bundle: Path,
    tiny_target: Path,
    tiny_head: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The tiny bundle with portable graphs, caches in the type of the parameter."""
    out = tmp_path_factory.mktemp("portable") / request.param
    return with_portable_graphs(tiny_bundle, tiny_target, tiny_head, out, cache_dtype=request.param)


@pytest.fixture
def device(portable: Path) -> Session:
    """A session over it on the played device."""
    return Session(
        open_bundle(portable), profile="8", threads=None, kernels="auto", drafting="compiled", memory=HostMemory()
    )


def test_trees_say_what_plain_decoding_says(device: Session) -> None:
    with device as session:
        assert (session.engine.device, session.engine.target) == ("cuda", "portable/target.onnx")
        for prompt in PROMPTS:
            plain = session.generate(prompt, profile="plain", max_new_tokens=12, ignore_eos=True)
            for profile in ("4", "8", "16", "auto"):
                tree = session.generate(prompt, profile=profile, max_new_tokens=12, ignore_eos=True)
                assert tree.token_ids == plain.token_ids


def test_sampled_text_is_plain_decodings_with_the_same_seed(device: Session) -> None:
    with device as session:
        plain, tree = (
            session.generate(PROMPTS[0], profile=profile, max_new_tokens=24, temperature=0.8, seed=3).token_ids
            for profile in ("plain", "8")
        )
        assert tree == plain


def test_features_that_nobody_reads_for_long_do_not_pile_up(device: Session) -> None:
    with device as session:
        options = {"max_new_tokens": 80, "ignore_eos": True}
        plain = session.generate(PROMPTS[0], profile="plain", **options).token_ids
        state = session._state
        assert 0 < len(state.drafter._features) <= state.drafter._features.most // 2
        prompt = session.encode(PROMPTS[0]) + plain[:40]
        assert session.generate(token_ids=prompt, profile="8", max_new_tokens=40).token_ids == plain[40:]


def test_the_text_is_that_of_the_cpus_graphs(tiny_bundle: Path, device: Session) -> None:
    if device.engine.cache_dtype == "float32":
        with device as session, Session.open(tiny_bundle, kernels="stock") as cpu:
            for prompt in PROMPTS:
                found, expected = (each.generate(prompt, max_new_tokens=24).token_ids for each in (session, cpu))
                assert found == expected
