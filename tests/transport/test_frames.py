"""Frames: what is encoded is decoded again, and nothing else is accepted."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pippin.errors import ProtocolError
from pippin.transport import frames
from pippin.transport.frames import Assembler, Control, Header, Hidden, Kind, Plan, Stop
from pippin.types.step import Chunk, StepPlan

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

chunks = st.builds(
    Chunk,
    seq=st.integers(0, 1000),
    start=st.integers(0, 10**6),
    token_ids=st.lists(st.integers(0, 2**18), min_size=1, max_size=8),
    new_blocks=st.tuples(st.lists(st.integers(-1, 1000), max_size=3).map(tuple)),
    num_logits=st.integers(0, 4),
)


@st.composite
def tensors(draw, step=0):
    dtype = draw(st.sampled_from(sorted(frames.ITEM_SIZES)))
    shape = (draw(st.integers(0, 40)), draw(st.integers(1, 16)))
    size = shape[0] * shape[1] * frames.ITEM_SIZES[dtype]
    data = draw(st.binary(min_size=size, max_size=size))
    return Hidden(step, dtype, shape, memoryview(data), draw(st.floats(0, 100)))


def messages(step: int):
    return st.one_of(
        st.builds(
            Plan,
            plan=st.builds(
                StepPlan,
                step=st.just(step),
                chunks=st.lists(chunks, max_size=3).map(tuple),
                freed=st.lists(st.integers(0, 99), max_size=3).map(tuple),
            ),
            seconds=st.floats(0, 100),
        ),
        tensors(step),
        st.builds(Control, st.binary(max_size=100)),
        st.builds(Stop, st.text(max_size=40)),
    )


sequences = st.integers(0, 8).flatmap(lambda n: st.tuples(*(messages(step) for step in range(n))))


@pytest.fixture(autouse=True, scope="module")
def small_parts():
    """Parts of 64 bytes, so that small examples have several."""
    before, frames.PART_BYTES = frames.PART_BYTES, 64
    yield
    frames.PART_BYTES = before


def encoded(sequence) -> list[tuple[bytes, bytes]]:
    return [(head, bytes(body)) for message in sequence for head, body in frames.encode(message)]


@patient
@given(sequences)
def test_any_sequence_of_messages_comes_back(sequence):
    assembler = Assembler()
    back = [
        message
        for head, body in encoded(sequence)
        if (message := assembler.feed(frames.decode_head(head), body)) is not None
    ]
    assert back == list(sequence)


@patient
@given(tensors())
def test_parts_are_small_and_follow_each_other(hidden):
    end = 0
    for head, body in frames.encode(hidden):
        header = frames.decode_head(head)
        assert header.offset == end
        assert header.total == hidden.data.nbytes
        assert memoryview(body).nbytes <= frames.PART_BYTES
        end += memoryview(body).nbytes
    assert end == hidden.data.nbytes


def test_parts_share_the_tensors_memory():
    data = bytearray(range(200))
    hidden = Hidden(0, "float16", (10, 10), memoryview(data))
    bodies = [body for _, body in frames.encode(hidden)]
    data[0] = 99
    data[199] = 98
    assert bytes(bodies[0])[0] == 99
    assert bytes(bodies[-1])[-1] == 98


@patient
@given(st.data(), sequences.filter(bool))
def test_frames_lost_doubled_or_exchanged_inside_a_tensor_are_noticed(data, sequence):
    pairs = encoded(sequence)
    kinds = [frames.decode_head(head) for head, _ in pairs]
    inside = [
        i for i, header in enumerate(kinds) if header.kind is Kind.HIDDEN and header.offset > 0
    ]
    if not inside:
        return
    index = data.draw(st.sampled_from(inside))
    change = data.draw(st.sampled_from(["double", "exchange", "cut", "longer", "lost"]))
    head, body = pairs[index]
    if change == "double":
        pairs.insert(index, pairs[index])
    elif change == "exchange":
        pairs[index - 1], pairs[index] = pairs[index], pairs[index - 1]
    elif change == "cut":
        pairs[index] = (head, body[:-1])
    elif change == "longer":
        pairs[index] = (head, body + b"\0" * 64)
    else:
        del pairs[index]
    # What was whole before comes out; then an error, or a tensor that stays unfinished.
    assembler, back, refused = Assembler(), [], False
    for head, body in pairs:
        try:
            message = assembler.feed(frames.decode_head(head), body)
        except ProtocolError:
            refused = True
            break
        if message is not None:
            back.append(message)
    assert back == list(sequence)[: len(back)]
    assert refused or len(back) < len(sequence)


@patient
@given(st.binary(max_size=60), st.booleans())
def test_random_heads_are_refused_or_make_a_header(noise, prefixed):
    head = frames.encode_head(Header(Kind.STOP))[:4] + noise if prefixed else noise
    try:
        header = frames.decode_head(head)
    except ProtocolError:
        return
    assert prefixed
    assert isinstance(header.kind, Kind)
    assert header.offset >= 0 <= header.total


@patient
@given(
    st.builds(
        Header,
        kind=st.sampled_from(Kind),
        step=st.integers(-5, 5),
        dtype=st.sampled_from(["float32", "float16", "bfloat16", "int8", ""]),
        shape=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
        offset=st.integers(0, 2**40),
        total=st.integers(0, 2**50),
    ),
    st.binary(max_size=100),
)
def test_any_header_and_body_is_a_message_or_a_protocol_error(header, body):
    assembler = Assembler()
    assembler.expect("float32", 4)
    try:
        message = assembler.feed(frames.decode_head(frames.encode_head(header)), body)
    except ProtocolError:
        return
    if isinstance(message, Hidden):
        assert (message.dtype, message.shape[1]) == ("float32", 4)
        assert message.data.nbytes == message.shape[0] * 16


@patient
@given(st.lists(st.tuples(st.sampled_from(["plan", "hidden"]), st.integers(-3, 6)), max_size=8))
def test_steps_of_each_kind_only_go_up(steps):
    assembler = Assembler()
    last = {"plan": -99, "hidden": -99}
    for kind, step in steps:
        message = (
            Plan(StepPlan(step, ()))
            if kind == "plan"
            else Hidden(step, "float32", (1, 1), memoryview(bytes(4)))
        )
        [(head, body)] = frames.encode(message)
        if step > last[kind]:
            assert assembler.feed(frames.decode_head(head), body) is not None
            last[kind] = step
        else:
            with pytest.raises(ProtocolError, match=f"of step {step} after those of step"):
                assembler.feed(frames.decode_head(head), body)
            return


def test_steps_may_begin_anew_after_control():
    assembler = Assembler()
    for message in (Plan(StepPlan(5, ())), Control(b""), Plan(StepPlan(0, ()))):
        [(head, body)] = frames.encode(message)
        assert assembler.feed(frames.decode_head(head), body) == message


def test_header_stays_small():
    header = Header(Kind.HIDDEN, 123456, "bfloat16", (2048, 8192), 2**24, 2**25, 0.0123)
    assert len(frames.encode_head(header)) < 64
    assert msgspec.msgpack.decode(frames.encode_head(header)[4:], type=Header) == header
