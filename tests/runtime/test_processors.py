"""Each processor against Hugging Face's own, on random logits; those that are not Hugging Face's against a formula."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from eagle_runtime import Sampling
from eagle_runtime import processors as ours
from eagle_runtime.sampler import Sampler

VOCAB = 1000
SEEDS = range(20)


def random_logits(seed: int, vocab: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32)


def random_context(seed: int, length: int = 60, vocab: int = 12) -> np.ndarray:
    """Few enough tokens that n-grams repeat."""
    return np.random.default_rng(seed).integers(0, vocab, length)


def theirs(processor: hf.LogitsProcessor, context: np.ndarray, logits: np.ndarray) -> np.ndarray:
    return processor(torch.tensor(context)[None], torch.tensor(logits.copy())[None])[0].numpy()


def changed(function: Callable[..., None], logits: np.ndarray, *args: object, **options: object) -> np.ndarray:
    copy = logits.copy()
    function(copy, *args, **options)
    return copy


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("k", [1, 2, 5, 50, 999, 1000, 5000])
def test_top_k(seed: int, k: int) -> None:
    logits = random_logits(seed)
    assert_same(changed(ours.keep_top_k, logits, k), theirs(hf.TopKLogitsWarper(k), np.zeros(1, int), logits))


def test_top_k_keeps_what_equals_the_kth() -> None:
    logits = np.array([3, 1, 2, 2, 2, 0], np.float32)
    assert_same(changed(ours.keep_top_k, logits, 2), theirs(hf.TopKLogitsWarper(2), np.zeros(1, int), logits))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.9, 0.95, 0.999])
def test_top_p(seed: int, p: float) -> None:
    logits = random_logits(seed)
    assert_same(changed(ours.keep_top_p, logits, p), theirs(hf.TopPLogitsWarper(p), np.zeros(1, int), logits))


@pytest.mark.parametrize("p", [0.3, 0.9])
def test_top_p_after_bans(p: float) -> None:
    logits = changed(ours.keep_top_k, random_logits(0), 7)
    assert_same(changed(ours.keep_top_p, logits, p), theirs(hf.TopPLogitsWarper(p), np.zeros(1, int), logits))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("p", [0.0, 0.02, 0.1, 0.5, 1.0])
def test_min_p(seed: int, p: float) -> None:
    logits = random_logits(seed)
    assert_same(changed(ours.keep_min_p, logits, p), theirs(hf.MinPLogitsWarper(p), np.zeros(1, int), logits))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
def test_repetition_penalty(seed: int, penalty: float) -> None:
    logits, context = random_logits(seed), random_context(seed)
    expected = theirs(hf.RepetitionPenaltyLogitsProcessor(penalty), context, logits)
    assert_same(changed(ours.penalize_repetition, logits, context, penalty), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_frequency_and_presence_penalty(seed: int) -> None:
    logits, answer = random_logits(seed), random_context(seed)
    counts = np.bincount(answer, minlength=VOCAB)
    expected = logits - 0.3 * counts - 0.7 * (counts > 0)
    assert_same(changed(ours.penalize_counts, logits, answer, frequency=0.3, presence=0.7), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 60])
def test_repeated_ngrams(seed: int, size: int, length: int) -> None:
    logits, context = random_logits(seed), random_context(seed, length, vocab=4)
    expected = theirs(hf.NoRepeatNGramLogitsProcessor(size), context, logits)
    assert_same(changed(ours.ban_repeated_ngrams, logits, context, size), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("length", [1, 2, 60])
def test_bad_words(seed: int, length: int) -> None:
    logits, context = random_logits(seed), random_context(seed, length, vocab=3)
    words = [[0, 1], [2, 2, 5], [1, 0, 2, 7], [9], [0, 11], [1, 12], [2, 13]]
    expected = theirs(hf.NoBadWordsLogitsProcessor(words), context, logits)
    assert_same(changed(ours.ban_words, logits, context, words), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_logit_bias(seed: int) -> None:
    logits, bias = random_logits(seed), {3: 5.0, 999: -100.0, 0: 0.5}
    processor = hf.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    assert_same(changed(ours.add_bias, logits, bias), theirs(processor, np.zeros(1, int), logits))


def test_suppressed_tokens() -> None:
    logits = random_logits(0)
    expected = theirs(hf.SuppressTokensLogitsProcessor([5, 8], device="cpu"), np.zeros(1, int), logits)
    assert_same(changed(ours.ban_tokens, logits, [5, 8]), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("answered", [0, 3, 5])
def test_all_together_in_hugging_faces_order(seed: int, answered: int) -> None:
    """The order of `GenerationMixin._get_logits_processor`."""
    prompt, answer = random_context(seed, 20), random_context(seed + 100, answered)
    eos, logits = [7, 300], random_logits(seed)
    sampling = Sampling(
        temperature=0.8,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        logit_bias={4: 2.0, 500: -3.0},
        bad_words_ids=[[7], [1, 2], [600]],
        suppress_tokens=[13, 14],
        min_new_tokens=4,
        seed=0,
    )
    sampler = Sampler(sampling, prompt=prompt, eos_token_ids=eos, capacity=100)
    sampler.follow(answer.tolist())
    context, expected = np.concatenate((prompt, answer)), logits
    for processor in (
        hf.SequenceBiasLogitsProcessor({(4,): 2.0, (500,): -3.0}),
        hf.RepetitionPenaltyLogitsProcessor(1.3),
        hf.NoRepeatNGramLogitsProcessor(2),
        hf.NoBadWordsLogitsProcessor([[7], [1, 2], [600]], eos),
        hf.MinNewTokensLengthLogitsProcessor(len(prompt), 4, eos),
        hf.SuppressTokensLogitsProcessor([13, 14], device="cpu"),
        hf.TemperatureLogitsWarper(0.8),
        hf.TopKLogitsWarper(40),
        hf.TopPLogitsWarper(0.9),
        hf.MinPLogitsWarper(0.01),
    ):
        expected = theirs(processor, context, expected)
    assert_same(sampler._processed(logits), expected)


@pytest.mark.parametrize("k", [0, 1, 5, 1000, 2000])
def test_best_tokens(k: int) -> None:
    logits = random_logits(3).round()  # with ties
    np.testing.assert_array_equal(ours.best_tokens(logits, k), np.argsort(-logits, kind="stable")[:k])
