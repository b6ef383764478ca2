"""The sampler: decides an answer's tokens by its options, in a deterministic tree or a sampled one.

Penalties and the user's processors see the path's own tokens: the context of a node is what is committed and the path
to it. The token at a position is drawn with noise of that position, so that nothing random has to be committed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_graphs import EagleError, Tree
from eagle_graphs.profiles import MAX_NODES
from eagle_graphs.tree import Floats, Ids
from eagle_runtime import processors as change
from eagle_runtime.accept import Walk, accept_child, walk
from eagle_runtime.noise import Floats64, draw, key_from, perturbed, uniform
from eagle_runtime.processors import Processor
from eagle_runtime.sampled_tree import BONUS, COIN, TOKEN, SampledTree
from eagle_runtime.sampling import Sampling
from eagle_runtime.verify import Verified


class Sampler:
    """Decides the tokens of one answer by `Sampling`. See `eagle_runtime.accept.Accepting`.

    Args:
        sampling: options, with a seed.
        prompt: its tokens.
        eos_token_ids: those that end the answer.
        capacity: most tokens that prompt and answer may have together.
        processors: the user's own.
    """

    needs_logits = True

    def __init__(
        self,
        sampling: Sampling,
        *,
        prompt: Sequence[int],
        eos_token_ids: Iterable[int],
        capacity: int,
        processors: Sequence[Processor] = (),
    ) -> None:
        assert sampling.seed is not None, "options without a seed"
        self._sampling, self._seed = sampling, sampling.seed
        self._eos = list(eos_token_ids)
        self._bad_words = [word for word in map(list, sampling.bad_words_ids) if word not in [[t] for t in self._eos]]
        self._processors = processors
        self._tokens = np.empty(capacity + 1 + MAX_NODES, np.int64)
        self._tokens[: len(prompt)] = prompt
        self._prompt_length = self._committed = len(prompt)
        self._states: list[list[Any]] = [[processor.start(self._tokens[: len(prompt)]) for processor in processors]]
        """States of the processors after the committed tokens, after one more that was decided, and so on."""

    def walk(self, tree: Tree, verified: Verified) -> Walk:
        """See `Accepting`. Raises EagleError where no token is left or a processor gave NaN."""
        logits = verified.logits
        assert logits is not None, "the target was not asked for logits"
        del self._states[1:]
        if isinstance(tree, SampledTree):
            return walk(tree, lambda row: self._decided(self._choose(tree, row, self._processed(logits[row]))))
        return walk(tree, lambda row: self._decided(self._draw(self._processed(logits[row]))))

    def commit(self, tokens: Sequence[int]) -> None:
        """See `Accepting`."""
        self._states = [self._states[len(tokens)]]
        self._committed += len(tokens)

    def follow(self, tokens: Sequence[int]) -> None:
        """Takes over tokens that were decided elsewhere."""
        for token in tokens:
            self._decided(token)
        self.commit(tokens)

    def scores(self, logits: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        """[V] what the next token has the most of: the target's logits [V], processed and, if sampled, perturbed."""
        processed = self._processed(logits)
        if self._sampling.greedy:
            return processed
        return perturbed(processed, self._key(TOKEN))

    @property
    def _length(self) -> int:
        """Tokens so far, those included that were decided on the path under way."""
        return self._committed + len(self._states) - 1

    def _key(self, stream: int) -> int:
        """Key of the noise for the next token."""
        return key_from(self._seed, stream, self._length)

    def _decided(self, token: int) -> int:
        self._tokens[self._length] = token
        state = [p.advance(s, token) for p, s in zip(self._processors, self._states[-1], strict=True)]
        self._states.append(state)
        return token

    def _processed(self, row: Floats) -> Floats:
        """[V] a changed copy of the target's logits [V] after the tokens so far."""
        options, logits = self._sampling, row.copy()
        context, answer = self._tokens[: self._length], self._tokens[self._prompt_length : self._length]
        change.add_bias(logits, options.logit_bias)
        if options.repetition_penalty != 1:
            change.penalize_repetition(logits, context, options.repetition_penalty)
        if (options.frequency_penalty or options.presence_penalty) and len(answer):
            frequency, presence = options.frequency_penalty, options.presence_penalty
            change.penalize_counts(logits, answer, frequency=frequency, presence=presence)
        if options.no_repeat_ngram_size:
            change.ban_repeated_ngrams(logits, context, options.no_repeat_ngram_size)
        change.ban_words(logits, context, self._bad_words)
        if len(answer) < options.min_new_tokens:
            change.ban_tokens(logits, self._eos)
        change.ban_tokens(logits, options.suppress_tokens)
        for processor, state in zip(self._processors, self._states[-1], strict=True):
            processor.process(state, logits)
        if options.temperature:
            with np.errstate(over="ignore"):  # found by the check
                logits /= np.float32(options.temperature)
        self._check(logits)
        if options.temperature:
            if options.top_k:
                change.keep_top_k(logits, options.top_k)
            if options.top_p is not None and options.top_p < 1:
                change.keep_top_p(logits, options.top_p)
            if options.min_p:
                change.keep_min_p(logits, options.min_p)
        return logits

    def _check(self, logits: Floats) -> None:
        best = float(logits.max())
        if math.isfinite(best):
            return
        number = self._length - self._prompt_length + 1
        if best == -math.inf:
            raise EagleError(f"every token is banned as token {number} of the answer: ban fewer, or shorter n-grams")
        raise EagleError(f"processed logits hold {best} for token {number} of the answer: check bias and processors")

    def _draw(self, logits: Floats) -> int:
        return int(logits.argmax()) if self._sampling.greedy else draw(logits, self._key(TOKEN))

    def _choose(self, tree: SampledTree, row: int, logits: Floats) -> int:
        """The next token at a node of a sampled tree.

        All tokens that the head cannot have drawn are one to `accept_child`: q is 0 for each of them, so that their
        shares of p never change.
        """
        children = tree.tokens[tree.parents == row].tolist()
        if not children:
            return self._draw(logits)
        ids, others = tree.ids[row], len(tree.ids[row])
        index_of = {token: index for index, token in enumerate(ids.tolist())}
        p, coins = _shares(logits, ids), self._key(COIN)

        def coin(child: int, probability: float) -> bool:
            return uniform(coins, int(ids[child])) < probability

        taken, left = accept_child(p, np.append(tree.q[row], 0.0), [index_of[token] for token in children], coin)
        if taken is None:
            with np.errstate(divide="ignore"):
                taken = draw(np.log(left), self._key(BONUS))
        if taken != others:
            return int(ids[taken])
        logits[ids] = -np.inf
        return self._draw(logits)


def _shares(logits: Floats, ids: Ids) -> Floats64:
    """[K + 1] probabilities of `ids` [K], and of all other tokens together."""
    top = logits.max()
    others = logits.copy()
    others[ids] = -np.inf
    weights = np.append(np.exp(logits[ids] - top, dtype=np.float64), change.sum_of_weights(others, top))
    shares: Floats64 = weights / weights.sum()
    return shares
