"""Token ids to text, as they come: whole characters only, stop strings never shown.

What is not sure yet is held back: bytes of a character that is not complete, and the longest end
of the text that may still become a stop string. Nothing else waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from pippin.server.stop_strings import StopFinder
from pippin.server.token_decoders import make_decoder
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
    not shown, has an empty piece. They may come some tokens later than the text's first part."""
    piece_bytes: tuple[bytes, ...]
    """Their bytes: these join to the text's UTF-8, also where a character spans tokens."""
    offsets: tuple[int, ...]
    """Where each piece starts, in characters of the answer."""


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
        self._waiting: list[_Waiting] = []
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
                self._waiting.append(_Waiting("", b"", not self._decoder.pending))
                break
            active = self._num_tokens > self._min_tokens
            special = self._special_stops.get(token_id) if self._special_stops and active else None
            if special is not None:
                text = special if self._include_stop else ""
                self._waiting.append(_Waiting(text, text.encode(), not self._decoder.pending))
                return self._stop(released + self._stops.flush() + text, index + 1, special)
            piece = self._decoder.push(token_id)
            shown = self._decoder.shown_bytes(token_id)
            self._waiting.append(_Waiting(piece, shown, not self._decoder.pending))
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
        waiting = self._waiting
        if len(waiting) == 1 and len(released) == len(waiting[0].piece) and waiting[0].ends_whole:
            token, offset = waiting.pop(), self._settled  # by far the most steps
            self._settled = self._sent
            return DetokenizedStep(released, kept, stop, (token.piece,), (token.data,), (offset,))
        count = len(waiting) if self._done else self._count_settled()
        pieces: list[str] = []
        raw: list[bytes] = []
        offsets: list[int] = []
        for piece, data, shown_whole in self._cut(count):
            pieces.append(piece)
            raw.append(data if shown_whole else piece.encode())
            offsets.append(self._settled)
            self._settled += len(piece)
        del waiting[:count]
        return DetokenizedStep(released, kept, stop, tuple(pieces), tuple(raw), tuple(offsets))

    def _count_settled(self) -> int:
        """How many tokens in front are sent whole and end where a character ends."""
        count, end = 0, self._settled
        for index, token in enumerate(self._waiting):
            end += len(token.piece)
            if end > self._sent:
                break
            if token.ends_whole:
                count = index + 1
        return count

    def _cut(self, count: int) -> Iterator[tuple[str, bytes, bool]]:
        """The first waiting tokens, cut where the sent text ends.

        The flag tells whether all of the characters that the token has a part of are shown.
        """
        start = self._settled
        group: list[_Waiting] = []
        for index, token in enumerate(self._waiting[:count]):
            group.append(token)
            if not token.ends_whole and index < count - 1:
                continue
            end = start + sum(len(each.piece) for each in group)
            whole = token.ends_whole and end <= self._sent
            for each in group:
                piece = each.piece[: max(0, self._sent - start)]
                start += len(each.piece)
                yield piece, each.data, whole
            group.clear()


class _Waiting(NamedTuple):
    """A token whose piece is not reported yet."""

    piece: str
    data: bytes
    ends_whole: bool
    """Whether no character was begun and not ended behind it."""
