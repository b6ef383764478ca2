"""Committed token ids to text, piece by piece, ending at a stop string.

A round commits several tokens, and neither a character nor a stop string keeps to their borders. So a
piece holds only what no later token can change: a character whose bytes are incomplete and a beginning
of a stop string are kept back until they are decided.

`tokenizers.decoders.DecodeStream` is not used: it says nothing while the text ends in U+FFFD and decodes
all that it keeps back for every token, so bytes that never form a character silence it at quadratic
cost. Here each token decodes a short window of the latest ones, whatever the length of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from eagle_graphs.errors import EagleError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# An incomplete UTF-8 character is at most 3 bytes, decoded as one replacement character (byte-level
# tokenizers) or as one for each byte (byte fallback), so at most 3 characters can still change.
_UNSETTLED = 3

# Those stand for at most 9 bytes; up to 3 more let a decoder that starts within a character find the next
# border. A token has at least one byte: 12 tokens of context decode to the same end as the whole answer.
_CONTEXT = 12
_WINDOW = 32


class TextStream:
    """The text of one answer, from its token ids as they are committed.

    The pieces of `push` and `flush` joined are `tokenizer.decode(ids, skip_special_tokens=True)`, cut
    before the first stop string. There is one exception: a tokenizer with byte fallback unmakes
    characters that are already shown if an invalid byte follows them directly; here they stay.

    Args:
        tokenizer: the target's tokenizer.
        stop: strings that end the answer. The one that is completed first counts; of two that are
            completed by the same character, the longer.

    Raises:
        EagleError: `stop` is not a sequence of non-empty strings.
    """

    stopped: bool
    """A stop string was completed; whatever is pushed from then on is ignored."""
    tokens_used: int
    """How many of the pushed tokens belong to the answer; the one that completes a stop string is the last."""

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = ()) -> None:
        if isinstance(stop, str):
            raise EagleError(f"stop is the string {stop!r}: expected a list of strings, such as [{stop!r}]")
        for string in stop:
            if not isinstance(string, str) or not string:
                raise EagleError(f"stop holds {string!r}: expected non-empty strings; leave it out")
        self.stopped = False
        self.tokens_used = 0
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        self._window: list[int] = []
        self._settled = ""  # the beginning of the window's text that later tokens cannot change
        self._held = ""  # settled, but perhaps the beginning of a stop string
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All that was given out so far."""
        return "".join(self._pieces)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take newly committed tokens; returns the text that is now safe to show, possibly none."""
        piece = ""
        for token in token_ids:
            if self.stopped:
                break
            self.tokens_used += 1
            piece += self._release(self._settle(int(token)))
        self._pieces.append(piece)
        return piece

    def flush(self) -> str:
        """End the answer; returns what was kept back, with U+FFFD for an incomplete character."""
        if self.stopped:
            return ""
        rest = self._decode(self._window)[len(self._settled) :]
        self._settled += rest
        piece = self._release(rest)
        if not self.stopped:
            piece, self._held = piece + self._held, ""
        self._pieces.append(piece)
        return piece

    def _settle(self, token: int) -> str:
        """Decode one more token; returns the text that became final."""
        # Left out before decoding: special tokens must not use up the window.
        if token in self._special or self._tokenizer.id_to_token(token) is None:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        if not text.startswith(self._settled):
            # Byte fallback: one unfinished byte turns the whole run of bytes before it into U+FFFD.
            self._window, self._settled = [token], ""
            text = self._decode(self._window)
        end = len(text)
        while end > max(len(self._settled), len(text) - _UNSETTLED) and text[end - 1] == _REPLACEMENT:
            end -= 1
        new, self._settled = text[len(self._settled) : end], text[:end]
        if len(self._window) == _WINDOW:
            self._shorten_window(text)
        return new

    def _shorten_window(self, text: str) -> None:
        """Forget the window's older tokens, preferably those before a character's border."""
        # A byte-level decoder recovers from any cut. Byte fallback does not, but has a token for each byte,
        # so that one of four cuts falls between characters.
        for start in range(_WINDOW - _CONTEXT - 3, _WINDOW - _CONTEXT + 1):
            shorter = self._decode(self._window[start:])
            if text.endswith(shorter):
                break
        unsettled = len(text) - len(self._settled)
        self._window, self._settled = self._window[start:], shorter[: len(shorter) - unsettled]

    def _release(self, new: str) -> str:
        """Add settled text; returns what no stop string can claim any more."""
        text = self._held + new
        matches = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            self.stopped, self._held = True, ""
            return text[: min(matches)[1]]
        longest = max(map(len, self._stop), default=1) - 1
        held = next(
            (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0
        )
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
