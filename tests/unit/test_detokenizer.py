"""Streams join to the whole text, show whole characters only and never a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_standins import (
    byte_fallback_backend,
    byte_level_backend,
    tokenizer,
    wordpiece_backend,
)

from pippin.server.detokenizer import DetokenizedStep, Detokenizer
from pippin.server.stop_strings import StopFinder
from pippin.server.token_bytes import byte_level_alphabet, incomplete_tail
from pippin.server.token_decoders import WindowDecoder
from pippin.server.tokenizer import Tokenizer
from pippin.types.request import SamplingParams

BYTES = tokenizer()
FALLBACK = tokenizer(byte_fallback_backend())
WORDS = tokenizer(wordpiece_backend())
SIZE = BYTES.vocab_size
ALPHABET = {value: char for char, value in byte_level_alphabet().items()}
EOS = BYTES.eos_token_ids[0]

ids_strategy = st.lists(st.integers(0, SIZE - 1), max_size=40)
text_strategy = st.text(
    st.sampled_from(list("ab é好🚀\n\u200d")) | st.characters(exclude_categories=["Cs"]),
    max_size=30,
)


def stream(
    detokenizer: Detokenizer, ids: Sequence[int], sizes: Sequence[int] = ()
) -> list[DetokenizedStep]:
    """Push ids in groups of ``sizes`` (then one by one), the last with ``finished``."""
    steps = []
    groups = iter(sizes)
    start = 0
    while start < len(ids):
        end = min(len(ids), start + next(groups, 1))
        steps.append(detokenizer.push(ids[start:end], end == len(ids)))
        start = end
    if not ids:
        steps.append(detokenizer.push([], True))
    return steps


def joined(steps: Sequence[DetokenizedStep]) -> str:
    return "".join(step.text for step in steps)


def whole(ids: Sequence[int], skip: bool = True) -> str:
    """The full decode, less what is no character at the very end."""
    shown = [i for i in ids if not (skip and BYTES.is_special(i))]
    data = b"".join(BYTES.token_bytes(i) for i in shown)
    end = len(data)
    while end and not _ends_whole(data[:end]):
        end -= 1
    return data[:end].decode("utf-8", "replace")


def _ends_whole(data: bytes) -> bool:
    return any(_decodes(data[-n:]) for n in range(1, 5) if len(data) >= n)


def _decodes(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(ids=ids_strategy, sizes=st.lists(st.integers(1, 5)), skip=st.booleans())
@settings(deadline=None)
def test_random_ids_join_to_the_full_decode(ids: list[int], sizes: list[int], skip: bool) -> None:
    params = SamplingParams(ignore_eos=True, skip_special_tokens=skip)
    steps = stream(Detokenizer(BYTES, params, [1]), ids, sizes)
    text = joined(steps)
    assert text == whole(ids, skip)
    full = byte_level_backend().decode(ids, skip_special_tokens=skip)
    assert full.startswith(text)
    assert set(full[len(text) :]) <= {"\ufffd"}
    assert sum(step.num_tokens_kept for step in steps) == len(ids)


@given(text=text_strategy, stops=st.lists(text_strategy.filter(bool), max_size=3))
@settings(deadline=None)
def test_pieces_join_to_the_text(text: str, stops: list[str]) -> None:
    ids = BYTES.encode(text)
    steps = stream(Detokenizer(BYTES, SamplingParams(stop=tuple(stops)), [1]), ids)
    pieces = [piece for step in steps for piece in step.pieces]
    shown = joined(steps)
    assert "".join(pieces) == shown
    assert len(pieces) == sum(step.num_tokens_kept for step in steps)
    assert [offset for step in steps for offset in step.offsets] == [
        len("".join(pieces[:index])) for index in range(len(pieces))
    ]
    data = b"".join(data for step in steps for data in step.piece_bytes)
    assert data.decode() == shown


@given(text=text_strategy.filter(lambda text: "▁" not in text))
@settings(deadline=None)
def test_text_comes_back(text: str) -> None:
    for tok in (BYTES, FALLBACK):
        ids = tok.encode(text)
        assert joined(stream(Detokenizer(tok, SamplingParams(), [1]), ids)) == text


def test_characters_come_out_whole() -> None:
    text = "🌶️🚀 ñandú 👩‍🌾 你好"
    ids = list(map(_byte, text.encode()))
    steps = stream(Detokenizer(BYTES, SamplingParams(), [1]), ids)
    assert joined(steps) == text
    assert all("\ufffd" not in step.text for step in steps)
    assert any(step.text == "" for step in steps)


def test_cut_inside_a_character_shows_nothing() -> None:
    first = _byte(0xF0)
    for ids in ([first], [first, _byte(0x9F)], [first, first, first]):
        steps = stream(Detokenizer(BYTES, SamplingParams(), [1]), [*BYTES.encode("a"), *ids])
        assert joined(steps) == "a"


def test_broken_bytes_show_once_a_character_follows() -> None:
    detokenizer = Detokenizer(BYTES, SamplingParams(), [1])
    assert detokenizer.push([_byte(0xF0)]).text == ""
    assert detokenizer.push([_byte(0x41)]).text == "\ufffdA"
    for _ in range(300):  # what waits is bounded
        text = detokenizer.push([_byte(0x80)]).text
    assert "\ufffd" in text or len(detokenizer._decoder.pending) <= 65


def test_bytes_of_a_character_that_is_cut_off_are_left_out() -> None:
    """Also where an end token follows, or tokens already waited for the character."""
    for tail in ([], [EOS], [2, 2]):
        ids = [_byte(0x61), _byte(0xF0), _byte(0x9F), *tail]
        steps = stream(Detokenizer(BYTES, SamplingParams(), [1]), ids)
        assert b"".join(data for step in steps for data in step.piece_bytes) == b"a"
        assert sum(len(step.pieces) for step in steps) == len(ids)


def test_a_real_replacement_character_is_text() -> None:
    ids = [_byte(b) for b in "\ufffd".encode()]
    assert joined(stream(Detokenizer(BYTES, SamplingParams(), [1]), ids)) == "\ufffd"


def _byte(value: int) -> int:
    """The token of one byte."""
    return byte_level_backend().token_to_id(ALPHABET[value])


ROCKET = "🚀".encode()


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_prompt_that_ends_inside_a_character(cut: int) -> None:
    prompt = [*BYTES.encode("Hello world"), *map(_byte, ROCKET[:cut])]
    rest = list(map(_byte, ROCKET[cut:]))
    detokenizer = Detokenizer(BYTES, SamplingParams(), prompt)
    assert joined(stream(detokenizer, [*rest, *BYTES.encode("!")])) == "🚀!"
    assert BYTES.decode_whole(prompt) == "Hello world"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_prompt_tail_that_the_answer_leaves_alone(cut: int) -> None:
    """The prompt's half character is not the answer's text."""
    prompt = [*BYTES.encode("Hello world"), *map(_byte, ROCKET[:cut])]
    assert joined(stream(Detokenizer(BYTES, SamplingParams(), prompt), BYTES.encode("no"))) == "no"
    again = [*map(_byte, ROCKET), *BYTES.encode("!")]
    assert joined(stream(Detokenizer(BYTES, SamplingParams(), prompt), again)) == "🚀!"
    assert joined(stream(Detokenizer(BYTES, SamplingParams(), prompt), [])) == ""


def test_prompt_tail_behind_a_control_token() -> None:
    prompt = [_byte(0xF0), 1]
    ids = [_byte(0x9F), *BYTES.encode("a")]
    assert joined(stream(Detokenizer(BYTES, SamplingParams(), prompt), ids)) == "\ufffda"


def test_incomplete_tail() -> None:
    assert incomplete_tail(b"a" + ROCKET[:3]) == ROCKET[:3]
    assert incomplete_tail(ROCKET) == b""
    assert incomplete_tail(b"\x80\x80\x80\x80") == b""
    assert incomplete_tail(b"\xff") == b""
    assert incomplete_tail(b"\xed\xa0") == b""  # would be a surrogate
    assert incomplete_tail(b"") == b""


def test_ids_without_a_token_have_no_text() -> None:
    ids = [*BYTES.encode("a"), SIZE + 5, *BYTES.encode("b")]
    steps = stream(Detokenizer(BYTES, SamplingParams(), [1]), ids)
    assert joined(steps) == "ab"
    assert sum(step.num_tokens_kept for step in steps) == 3


# -- SentencePiece and other decoders --------------------------------------------------------------


def _fallback(*pieces: str) -> list[int]:
    return [byte_fallback_backend().token_to_id(piece) for piece in pieces]


def test_spaces_of_sentencepiece() -> None:
    """The first space of a text goes, that of an answer behind a prompt stays."""
    ids = _fallback("▁ab", "▁a")
    behind = Detokenizer(FALLBACK, SamplingParams(), _fallback("<s>", "▁a"))
    assert joined(stream(behind, ids)) == " ab a"
    first = Detokenizer(FALLBACK, SamplingParams(), _fallback("<s>"))
    assert joined(stream(first, ids)) == "ab a" == byte_fallback_backend().decode(ids)


def test_byte_fallback() -> None:
    rocket = _fallback(*(f"<0x{byte:02X}>" for byte in ROCKET))
    steps = stream(Detokenizer(FALLBACK, SamplingParams(), _fallback("a")), [*rocket, *rocket[:2]])
    assert [step.text for step in steps] == ["", "", "", "🚀", "", ""]
    assert FALLBACK.token_bytes(rocket[0]) == b"\xf0"


def test_other_decoders() -> None:
    backend = wordpiece_backend()
    assert not WORDS.bytes.exact
    ids = [backend.token_to_id(w) for w in ("hello", ",", "un", "##aff", "##able", "world", "!")]
    prompt = [backend.token_to_id("world")]
    detokenizer = Detokenizer(WORDS, SamplingParams(), prompt)
    assert isinstance(detokenizer._decoder, WindowDecoder)
    steps = stream(detokenizer, ids)
    assert [step.text for step in steps] == [" hello", ",", " un", "aff", "able", " world", "!"]
    hidden = [backend.token_to_id("[SEP]")] * 50
    params = SamplingParams(ignore_eos=True)
    assert joined(stream(Detokenizer(WORDS, params, prompt), [*hidden, ids[0]])) == " hello"


# -- stop strings ----------------------------------------------------------------------------------


def reference(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first stop that is complete, of several the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


stop_text = st.text(st.sampled_from("ab好\n"), max_size=25)
stop_words = st.lists(st.text(st.sampled_from("ab好\n"), min_size=1, max_size=4), max_size=4)


@given(parts=st.lists(stop_text, max_size=8), stops=stop_words, include=st.booleans())
@settings(max_examples=400, deadline=None)
def test_stops_equal_a_slow_reference(parts: list[str], stops: list[str], include: bool) -> None:
    finder = StopFinder(stops, include)
    shown, found = "", None
    for part in parts:
        text, found = finder.push(part)
        shown += text
        if found is not None:
            break
        # Nothing of a stop string may have left, and nothing else may wait.
        held = finder._held
        longest = max(
            (
                length
                for stop in stops
                for length in range(1, len(stop))
                if (shown + held).endswith(stop[:length])
            ),
            default=0,
        )
        assert len(held) == (0 if include else longest)
    else:
        shown += finder.flush()
    assert (shown, found) == reference("".join(parts), stops, include)


@given(text=stop_text, stops=stop_words, include=st.booleans(), sizes=st.lists(st.integers(1, 6)))
@settings(deadline=None)
def test_stops_over_tokens(text: str, stops: list[str], include: bool, sizes: list[int]) -> None:
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    ids = BYTES.encode(text)
    steps = stream(Detokenizer(BYTES, params, [1]), ids, sizes)
    expected, stop = reference(text, stops, include)
    assert joined(steps) == expected
    assert [step.stop for step in steps if step.stop is not None] == ([stop] if stop else [])
    kept = sum(step.num_tokens_kept for step in steps)
    assert kept <= len(ids)
    if stop:  # the token that completes the stop is the last one that counts
        done = BYTES.decode(ids[:kept])
        assert reference(done, stops, include)[1] == stop
        assert reference(BYTES.decode(ids[: kept - 1]), stops, include)[1] is None


def test_near_miss_comes_out_at_the_end() -> None:
    ids = BYTES.encode("abcabd")
    detokenizer = Detokenizer(BYTES, SamplingParams(stop=("abdx",)), [1])
    steps = stream(detokenizer, ids)
    assert joined(steps) == "abcabd"
    assert steps[-1].stop is None


def test_after_a_stop_nothing_comes() -> None:
    detokenizer = Detokenizer(BYTES, SamplingParams(stop=("b",)), [1])
    step = detokenizer.push([_byte(0x61), _byte(0x62), _byte(0x63), _byte(0x64)])
    assert (step.text, step.num_tokens_kept, step.stop) == ("a", 2, "b")
    assert step.pieces == ("a", "")
    later = detokenizer.push([_byte(0x63)], True)
    assert (later.text, later.num_tokens_kept, later.stop, later.pieces) == ("", 0, None, ())
    assert detokenizer.num_tokens == 2


def test_min_tokens_delays_stop_strings() -> None:
    """As in vLLM: a stop counts when a token behind ``min_tokens`` completes it."""
    ids = [_byte(ord(char)) for char in "abcabc"]
    params = SamplingParams(stop=("b",), min_tokens=3, max_tokens=9)
    assert joined(stream(Detokenizer(BYTES, params, [1]), ids)) == "abca"
    params = SamplingParams(stop=("bc",), min_tokens=2, max_tokens=9)
    assert joined(stream(Detokenizer(BYTES, params, [1]), ids)) == "a"
    params = SamplingParams(stop=("bc",), min_tokens=9, max_tokens=9)
    assert joined(stream(Detokenizer(BYTES, params, [1]), ids)) == "abcabc"


def test_several_stops_in_one_token_do_not_depend_on_their_order() -> None:
    ids = BYTES.encode("hello")
    for stops in (("llo", "el"), ("el", "llo")):
        step = Detokenizer(BYTES, SamplingParams(stop=stops), [1]).push(ids, True)
        assert (step.text, step.stop) == ("h", "el")


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [True, False])
def test_the_end_token_is_counted_but_not_shown(skip: bool) -> None:
    params = SamplingParams(skip_special_tokens=skip)
    step = Detokenizer(BYTES, params, [1]).push([_byte(0x61), EOS], True)
    assert (step.text, step.num_tokens_kept, step.stop) == ("a", 2, None)
    assert (step.pieces, step.piece_bytes) == (("a", ""), (b"a", b""))


def test_a_stop_token_is_not_shown() -> None:
    token = _byte(0x62)
    params = SamplingParams(stop_token_ids=(token,))
    assert Detokenizer(BYTES, params, [1]).push([token], True).text == ""
    included = SamplingParams(stop_token_ids=(token,), include_stop_str_in_output=True)
    assert Detokenizer(BYTES, included, [1]).push([token], True).text == "b"
    told = Detokenizer(BYTES, SamplingParams(), [1]).push([token], True, stopped=True)
    assert (told.text, told.num_tokens_kept) == ("", 1)


def test_end_token_that_is_ignored() -> None:
    params = SamplingParams(ignore_eos=True, skip_special_tokens=False)
    step = Detokenizer(BYTES, params, [1]).push([EOS, EOS], True)
    assert step.text == "<|im_end|><|im_end|>"


@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_as_stop_string(skip: bool) -> None:
    marker = "<|im_start|>"
    ids = [_byte(0x61), *BYTES.encode(marker), _byte(0x62)]
    params = SamplingParams(stop=(marker,), skip_special_tokens=skip)
    steps = stream(Detokenizer(BYTES, params, [1]), ids)
    assert joined(steps) == "a"
    assert steps[1].stop == marker
    included = SamplingParams(
        stop=(marker,), skip_special_tokens=skip, include_stop_str_in_output=True
    )
    assert joined(stream(Detokenizer(BYTES, included, [1]), ids)) == f"a{marker}"


def test_special_tokens_in_the_middle() -> None:
    ids = BYTES.encode("a<|im_start|>b<tool_call>")
    hidden = stream(Detokenizer(BYTES, SamplingParams(), [1]), ids)
    assert joined(hidden) == "ab<tool_call>"
    shown = SamplingParams(skip_special_tokens=False)
    assert joined(stream(Detokenizer(BYTES, shown, [1]), ids)) == "a<|im_start|>b<tool_call>"
    # A stop string is found in the text that is shown, across a hidden token.
    assert joined(stream(Detokenizer(BYTES, SamplingParams(stop=("ab",)), [1]), ids)) == ""


def test_every_tokenizer_kind_knows_its_bytes() -> None:
    def check(tok: Tokenizer, ids: list[int]) -> None:
        assert b"".join(map(tok.token_bytes, ids)).decode().strip() == tok.decode(ids).strip()

    check(BYTES, BYTES.encode("ab 好 🚀 é"))
    check(FALLBACK, FALLBACK.encode("ab 好 🚀 é"))
