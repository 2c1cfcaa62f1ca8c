"""Token ids to text, as they come: whole characters only, stop strings never shown.

What is not sure yet is held back: bytes of a character that is not complete, and the longest end
of the text that may still become a stop string. Nothing else waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from pippin.server.token_bytes import incomplete_tail
from pippin.server.tokenizer import Tokenizer
from pippin.types.request import SamplingParams


class DetokenizedStep(msgspec.Struct, frozen=True):
    """What one ``push`` brought."""

    text: str
    """Text that may be sent now."""
    num_tokens_kept: int
    """Of the tokens pushed, those that belong to the answer (fewer only behind a stop string)."""
    stop: str | None
    """The stop string that ended the answer; the caller aborts the request."""
    pieces: tuple[str, ...]
    """Texts of the kept tokens whose text is now settled, in order: the first ones not reported
    before. All pieces of an answer join to its text; a token inside a character, and one that is
    not shown, has an empty piece."""
    piece_bytes: tuple[bytes, ...]
    """Their bytes: these join to the text's UTF-8, also where a character spans tokens."""
    offsets: tuple[int, ...]
    """Where each piece starts, in characters of the answer."""


class _Decoder(Protocol):
    def push(self, token_id: int) -> str:
        """Text that the token completes."""

    def shown_bytes(self, token_id: int) -> bytes:
        """Bytes that the token brings to the text."""


class Detokenizer:
    """Text of one sequence.

    ``prompt_token_ids`` give the context of the first token: a prompt may end inside a character.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> None:
        self._decoder = make_decoder(tokenizer, params.skip_special_tokens, prompt_token_ids)
        self._stops = StopFinder(params.stop, params.include_stop_str_in_output)
        self._special_stops = tokenizer.special_stops(params.stop)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        ends = () if params.ignore_eos else tokenizer.eos_token_ids
        self._end_ids = frozenset((*ends, *params.stop_token_ids))
        self._num_tokens = 0
        self._sent = 0
        self._settled = 0
        self._waiting: list[tuple[str, bytes]] = []
        self._done = False

    @property
    def num_tokens(self) -> int:
        """Tokens kept so far: the answer's length in usage."""
        return self._num_tokens

    def push(
        self, token_ids: Sequence[int], finished: bool = False, stopped: bool | None = None
    ) -> DetokenizedStep:
        """Add tokens. ``finished``: these are the last ones; everything held back comes out.

        ``stopped``: the last token ended the sequence and is not part of the text (unless stop
        strings are to be included). By default, whether it is an end-of-sequence or stop id.
        """
        if self._done:
            return DetokenizedStep("", 0, None, (), (), ())
        last = len(token_ids) - 1
        if stopped is None:
            stopped = finished and last >= 0 and token_ids[last] in self._end_ids
        released = ""
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            if stopped and index == last and not self._include_stop:
                self._waiting.append(("", b""))
                break
            active = self._num_tokens > self._min_tokens
            special = self._special_stops.get(token_id) if self._special_stops and active else None
            if special is not None:
                text = special if self._include_stop else ""
                self._waiting.append((text, text.encode()))
                return self._stop(released + self._stops.flush() + text, index + 1, special)
            piece = self._decoder.push(token_id)
            self._waiting.append((piece, self._decoder.shown_bytes(token_id)))
            if not self._stops:
                released += piece
            elif piece:
                text, stop = self._stops.push(piece, active)
                released += text
                if stop is not None:
                    return self._stop(released, index + 1, stop)
        if finished:
            self._done = True
            released += self._stops.flush()
        self._sent += len(released)
        return self._report(released, len(token_ids), None)

    def _stop(self, released: str, kept: int, stop: str) -> DetokenizedStep:
        self._done = True
        self._sent += len(released)
        return self._report(released, kept, stop)

    def _report(self, released: str, kept: int, stop: str | None) -> DetokenizedStep:
        """Hand out the pieces whose text has been sent; at the end, all, cut where the text is."""
        pieces: list[str] = []
        raw: list[bytes] = []
        offsets: list[int] = []
        taken = 0
        for piece, data in self._waiting:
            end = self._settled + len(piece)
            if end > self._sent:
                if not self._done:
                    break
                piece = piece[: max(0, self._sent - self._settled)]
                data = piece.encode()
                end = self._settled + len(piece)
            pieces.append(piece)
            raw.append(data)
            offsets.append(self._settled)
            self._settled = end
            taken += 1
        del self._waiting[:taken]
        return DetokenizedStep(released, kept, stop, tuple(pieces), tuple(raw), tuple(offsets))


class StopFinder:
    """Finds the stop string that is complete first, however the text is cut into pushes.

    Of several that end at the same character the longest counts.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._prefixes = frozenset(
            stop[:length] for stop in self._stops for length in range(1, len(stop))
        )
        self._longest = max(map(len, self._stops), default=0)
        self._include = include
        self._held = ""
        self._seen = ""
        """The last characters already released (at most ``_longest - 1``): only needed where a
        stop may begin in text that was let go, that is where stops are included."""

    def __bool__(self) -> bool:
        return bool(self._stops)

    def push(self, piece: str, active: bool = True) -> tuple[str, str | None]:
        """Text that may go out, and the stop string found.

        A stop counts when it is completed by a push with ``active`` (vLLM's ``min_tokens``).
        """
        before = len(self._seen) + len(self._held)
        text = self._seen + self._held + piece
        found = self._find(text, before) if active else None
        if found is not None:
            start, stop = found
            end = start + len(stop) if self._include else start
            released = text[len(self._seen) : end]
            self._held = ""
            return released, stop
        keep = 0 if self._include else self._hold(text)
        cut = len(text) - keep
        released = text[len(self._seen) : cut]
        self._held = text[cut:]
        self._seen = text[:cut][-(self._longest - 1) :] if self._longest > 1 else ""
        return released, None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, before: int) -> tuple[int, str] | None:
        """Earliest end behind ``before``, then earliest start."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, before - len(stop) + 1))
            if start != -1:
                found = (start + len(stop), start, stop)
                if best is None or found < best:
                    best = found
        return None if best is None else (best[1], best[2])

    def _hold(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0


def make_decoder(
    tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]
) -> _Decoder:
    if tokenizer.bytes.exact:
        return ByteDecoder(tokenizer, skip_special_tokens, prompt_token_ids)
    return WindowDecoder(tokenizer, skip_special_tokens, prompt_token_ids)


class ByteDecoder:
    """For tokenizers whose tokens are bytes.

    Bytes that can never be a character become U+FFFD, but only once a whole character follows:
    an answer that is cut inside a character simply ends before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]
    ) -> None:
        self._bytes = tokenizer.bytes
        self._hidden = tokenizer.bytes.special_ids if skip_special_tokens else frozenset()
        self._borrowed = self._prompt_tail(prompt_token_ids)
        self._pending = self._borrowed
        self._at_start = tokenizer.bytes.strips_first_space and all(
            token_id in self._hidden for token_id in prompt_token_ids
        )

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """Bytes of a character that the prompt begins and does not end (at most three)."""
        tail = b""
        for token_id in reversed(prompt_token_ids[-4:]):
            if token_id in self._bytes.special_ids:
                break
            tail = self._bytes[token_id] + tail
            if len(tail) >= 4:
                break
        return incomplete_tail(tail)

    def shown_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._hidden else self._bytes[token_id]

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        new = self._bytes[token_id]
        if self._at_start and new:
            self._at_start = False
            new = new.removeprefix(b" ")
        if self._pending:
            return self._join(new)
        try:
            return new.decode()
        except UnicodeDecodeError:
            return self._join(new)

    def _join(self, new: bytes) -> str:
        data = self._pending + new
        if self._borrowed:
            if incomplete_tail(data) == data:
                self._pending = data
                return ""
            borrowed, self._borrowed = self._borrowed, b""
            if not _completes(data, len(borrowed)):
                # The model went on with something else: the prompt's bytes are not its text.
                data = data[len(borrowed) :]
        text = data.decode("utf-8", "surrogateescape")
        end = len(text)
        while end and "\udc80" <= text[end - 1] <= "\udcff":
            end -= 1
        tail = len(text) - end
        if tail > _MAX_PENDING:
            tail = 0
        self._pending = data[len(data) - tail :]
        return data[: len(data) - tail].decode("utf-8", "replace")


#: Bytes of no character that are kept waiting for one.
_MAX_PENDING = 256


def _completes(data: bytes, borrowed: int) -> bool:
    """Whether the first character of ``data`` is whole and longer than ``borrowed`` bytes."""
    for length in range(borrowed + 1, 5):
        try:
            data[:length].decode()
        except UnicodeDecodeError:
            continue
        return len(data) >= length
    return False


class WindowDecoder:
    """For any other tokenizer: decode the last tokens with and without the new one.

    Source: Hugging Face text-generation-inference's and vLLM's incremental detokenisation.
    """

    #: Prompt tokens decoded with the first new ones, for the space between them.
    CONTEXT = 6

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_token_ids[-self.CONTEXT :])
        self._prefix = self._decode(self._ids)
        self._read = len(self._ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def shown_bytes(self, token_id: int) -> bytes:
        if self._skip and token_id in self._tokenizer.bytes.special_ids:
            return b""
        return self._tokenizer.bytes[token_id]

    def push(self, token_id: int) -> str:
        if self._skip and token_id in self._tokenizer.bytes.special_ids:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) <= len(self._prefix) or text.endswith("\ufffd"):
            return ""
        new = text[len(self._prefix) :]
        self._ids = self._ids[self._read :]
        self._prefix = self._decode(self._ids)
        self._read = len(self._ids)
        return new
