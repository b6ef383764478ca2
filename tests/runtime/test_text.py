"""Text as it streams: whole characters only, nothing of a stop string, and in sum what `decode` gives."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from eagle_graphs.errors import EagleError
from eagle_runtime.text import TextStream

SENTENCES = [
    "The cat sat on the mat, and then the cat left.",
    "A café in the old town sells naïve paintings.",
    "ภาษาไทย 中文字符 😀 and 👩‍👩‍👧 again",
    "END of the sentence. STOP here.\n\nUser: hello",
    "abab abba é😀ab baab aabb😀",
]


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Decodes as Llama 2 does: a space is stripped from the start, unknown characters are byte tokens."""
    words = ["▁the", "▁cat", "▁", "s", "END"]
    vocabulary = {token: index for index, token in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
SPECIAL = BYTE_LEVEL.token_to_id("<|end|>")


def byte_ids(data: bytes) -> list[int]:
    """One token a byte. GPT-2's alphabet: printable bytes stand for themselves, the others follow 255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [BYTE_LEVEL.token_to_id(characters[byte]) for byte in data]


def decode(ids: list[int], tokenizer: Tokenizer = BYTE_LEVEL) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def stream_pieces(stream: TextStream, ids: list[int], cuts: list[int]) -> list[str]:
    """Push the ids cut at `cuts`, then flush."""
    borders = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    pieces = [stream.push(ids[a:b]) for a, b in pairwise(borders)]
    return [*pieces, stream.flush()]


def cut_at_stop(text: str, stop: list[str]) -> str | None:
    """Reads character by character, as the definition says; None without a stop string."""
    for end in range(len(text) + 1):
        if done := [s for s in stop if text[:end].endswith(s)]:
            return text[: end - max(map(len, done))]
    return None


# Runs of single bytes and of merged tokens: emoji, halves of them, lone continuation bytes, special tokens.
any_ids = st.lists(
    st.one_of(
        st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=8),
        st.sampled_from(["😀", "👩‍👩‍👧", "é", "ไทย", "plain text"]).map(lambda text: byte_ids(text.encode())),
        st.sampled_from(["😀 the cat", "中文字符", "ภาษาไทย"]).map(lambda text: BYTE_LEVEL.encode(text).ids),
        st.binary(max_size=6).map(byte_ids),
        st.lists(st.sampled_from([0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0x9F, 0x98]), max_size=40).map(
            lambda data: byte_ids(bytes(data))
        ),
        st.integers(1, 40).map(lambda count: [SPECIAL] * count),
        st.just([10**6]),  # an id beyond the tokenizer: vocabularies are padded
    ),
    max_size=12,
).map(lambda runs: [token for run in runs for token in run])
any_cuts = st.lists(st.integers(0, 400), max_size=12)


@settings(max_examples=300, deadline=None)
@given(any_ids, any_cuts)
def test_pieces_join_to_the_decoded_text(ids, cuts):
    stream = TextStream(BYTE_LEVEL)
    pieces = stream_pieces(stream, ids, cuts)
    assert "".join(pieces) == decode(ids) == stream.text
    assert not stream.stopped
    assert stream.tokens_used == len(ids)


@settings(max_examples=200, deadline=None)
@given(any_ids)
def test_what_is_shown_never_changes(ids):
    stream = TextStream(BYTE_LEVEL)
    for token in ids:
        stream.push([token])
        assert decode(ids).startswith(stream.text)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["😀", "é", "ไทย", " the", "中", "🎉", " ", "s"]), max_size=60), any_cuts)
def test_byte_fallback_gives_the_same_text(parts, cuts):
    ids = []
    for part in parts:
        token = BYTE_FALLBACK.token_to_id(part.replace(" ", "▁"))
        ids += list(part.encode()) if token is None else [token]  # the id of a byte token is the byte
    pieces = stream_pieces(TextStream(BYTE_FALLBACK), ids, cuts)
    assert "".join(pieces) == decode(ids, BYTE_FALLBACK)


@pytest.mark.parametrize("before", range(32))
@pytest.mark.parametrize("run", ["😀" * 10, "😀" + "\n" * 40])
def test_byte_fallback_with_a_long_run_of_bytes(before, run):
    """Wherever the window is cut within the run, it must be cut between characters."""
    stream = TextStream(BYTE_FALLBACK)
    stream.push([BYTE_FALLBACK.token_to_id("s")] * before)
    assert stream.push([*run.encode()]) == run


def test_byte_fallback_keeps_what_is_shown_when_an_invalid_byte_follows():
    stream = TextStream(BYTE_FALLBACK)
    assert stream.push([*"😀".encode()]) == "😀"
    assert stream.push([0x80]) == ""
    assert stream.push([BYTE_FALLBACK.token_to_id("▁the")]) == "\ufffd the"


def test_a_character_appears_when_it_is_whole():
    stream = TextStream(BYTE_LEVEL)
    ids = byte_ids("😀!".encode())
    assert [stream.push([token]) for token in ids] == ["", "", "", "😀", "!"]
    assert stream.flush() == ""


def test_an_incomplete_character_comes_with_the_end():
    stream = TextStream(BYTE_LEVEL)
    assert stream.push(byte_ids("ok😀".encode()[:-1])) == "ok"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert stream.text == "ok\ufffd"


def test_bytes_that_never_form_a_character_do_not_silence_the_stream():
    stream = TextStream(BYTE_LEVEL)
    [lone] = byte_ids(b"\x80")
    for count in range(1, 200):
        stream.push([lone])
        assert len(stream.text) == max(0, count - 3)


@pytest.mark.parametrize("before", range(32))
def test_the_longest_unsettled_end_survives_the_shortening_of_the_window(before):
    ids = byte_ids(b"x" * before + b"\xf0\x9f\x98" * 3 + b"!")
    stream = TextStream(BYTE_LEVEL)
    assert stream.push(ids) == "x" * before + "\ufffd" * 3 + "!"


def test_token_borders_that_all_fall_inside_characters():
    """Each token ends one character and begins the next, so no window begins at a character's border."""
    tokenizer = byte_level_tokenizer()
    first, middle, last = "âĤ¬"  # the three bytes of the euro sign in GPT-2's alphabet
    tokenizer.add_tokens([AddedToken(middle + last + first, normalized=False)])
    inner = tokenizer.token_to_id(middle + last + first)
    ids = [*byte_ids("€".encode()[:1]), *[inner] * 100, *byte_ids("€".encode()[1:])]
    assert decode(ids, tokenizer) == "€" * 101
    stream = TextStream(tokenizer)
    assert [stream.push([token]) for token in ids] == ["", *["€"] * 100, "", "€"]


def test_special_tokens_give_no_text_but_are_counted():
    stream = TextStream(BYTE_LEVEL)
    euro = byte_ids("€".encode())
    assert stream.push([*euro[:1], *[SPECIAL] * 50, *euro[1:]]) == "€"
    assert stream.tokens_used == 53


def test_the_cost_of_a_token_does_not_grow_with_the_answer():
    decoded = []

    class Counting:
        def __getattr__(self, name):
            return getattr(BYTE_LEVEL, name)

        def decode(self, ids, **options):
            decoded.append(len(ids))
            return BYTE_LEVEL.decode(ids, **options)

    stream = TextStream(Counting())
    ids = (BYTE_LEVEL.encode("The cat sat on the mat 😀. ").ids + byte_ids(b"\x80" * 40)) * 40
    stream.push(ids)
    assert max(decoded) <= 32
    assert len(decoded) < 2 * len(ids)


# --- stop strings ---


def test_a_stop_string_ends_the_text_and_is_not_shown():
    ids = byte_ids(b"The catSTOP and more")
    stream = TextStream(BYTE_LEVEL, stop=["STOP"])
    assert stream.push(ids[:8]) == "The cat"  # the S may begin the stop string
    assert stream.push(ids[8:13]) == ""
    assert stream.stopped
    assert stream.tokens_used == len("The catSTOP")
    assert stream.push(ids[13:]) == stream.flush() == ""
    assert stream.tokens_used == len("The catSTOP")
    assert stream.text == "The cat"


def test_what_turns_out_not_to_be_a_stop_string_is_shown():
    stream = TextStream(BYTE_LEVEL, stop=["STOP"])
    assert [stream.push([token]) for token in byte_ids(b"STOLSTO")] == ["", "", "", "STOL", "", "", ""]
    assert stream.flush() == "STO"
    assert not stream.stopped
    assert stream.tokens_used == 7


def test_of_two_stop_strings_in_one_token_the_first_completed_wins():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("xabcd")])
    stream = TextStream(tokenizer, stop=["abcd", "bc"])
    assert stream.push([tokenizer.token_to_id("xabcd")]) == "xa"


def test_text_after_the_stop_within_one_token_is_dropped():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("aXb")])
    stream = TextStream(tokenizer, stop=["X"])
    assert stream.push([tokenizer.token_to_id("aXb"), *byte_ids(b"c")]) == "a"
    assert stream.tokens_used == 1


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("xabcd", ["abcd", "bc"], "xa"),  # "bc" is completed first
        ("xabc", ["bc", "abc"], "x"),  # completed together: the longer
        ("aaab", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("one\n\ntwo", ["\n\n", "two"], "one"),
        ("é😀!", ["😀"], "é"),
        ("END", ["END"], ""),
        ("EN", ["END", "N"], "E"),
    ],
)
def test_the_first_completed_stop_string_wins(text, stop, shown):
    for together in (True, False):
        stream = TextStream(BYTE_LEVEL, stop=stop)
        ids = byte_ids(text.encode())
        for push in [ids] if together else [[token] for token in ids]:
            stream.push(push)
        assert stream.text == shown
        assert stream.stopped


stop_alphabet = st.text("ab😀é", min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(st.text("ab😀é", max_size=80), st.lists(stop_alphabet, min_size=1, max_size=3), any_cuts, st.booleans())
def test_stop_strings_match_their_definition(text, stop, cuts, merged):
    ids = BYTE_LEVEL.encode(text).ids if merged else byte_ids(text.encode())
    stream = TextStream(BYTE_LEVEL, stop=stop)
    pieces = stream_pieces(stream, ids, cuts)
    shown = cut_at_stop(text, stop)
    assert "".join(pieces) == stream.text == (text if shown is None else shown)
    assert stream.stopped == (shown is not None)
    if stream.stopped:
        assert cut_at_stop(decode(ids[: stream.tokens_used]), stop) is not None
        assert cut_at_stop(decode(ids[: stream.tokens_used - 1]), stop) is None
    else:
        assert stream.tokens_used == len(ids)


@pytest.mark.parametrize("stop", [[""], ["ok", ""], "STOP", [3]])
def test_bad_stop_strings_are_refused(stop):
    with pytest.raises(EagleError, match=r"stop .* expected"):
        TextStream(BYTE_LEVEL, stop=stop)
