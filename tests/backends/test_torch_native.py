"""The compiled kernels equal torch's own operations."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch_tiny import MODELS, Driver, make_reference
from torch_tiny import reference_logits as expected

from pippin.backends.torch.native import build
from pippin.backends.torch.native.build import NoKernels
from pippin.backends.torch.native.linear import (
    NativeLinear,
    native_dense,
    native_quantized,
)
from pippin.backends.torch.native.ops import ACTIVATIONS, Kernels
from pippin.backends.torch.runner import load_checkpoint
from pippin.config import Config, ModelConfig, environment
from pippin.models.checkpoint import open_checkpoint
from pippin.models.files import local_directory
from pippin.models.quant import QuantizedTensor

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    try:
        return Kernels(environment().home / "kernels", threads=2)
    except NoKernels as error:
        pytest.skip(f"no compiled kernels here: {error}")


def close(actual: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.float(), wanted.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 1), (9, 3), (8, 8), (14, 2), (40, 8)])
@pytest.mark.parametrize("width", [16, 64, 80])
@pytest.mark.parametrize("window", [None, 37])
def test_attention(
    kernels: Kernels, dtype: torch.dtype, heads: tuple[int, int], width: int, window: int | None
) -> None:
    if not kernels.fits_head(dtype, width):
        pytest.skip("not a whole number of vectors")
    query_heads, kv_heads = heads
    torch.manual_seed(1)
    block_size, num_blocks = 8, 200
    pool = torch.randn(2 * kv_heads, num_blocks, block_size, width).to(dtype)
    # Length of a chunk, first slot seen, slot of its first token: decodes of one slot, behind a
    # window that begins inside a block, of about a tile and of more than one task; prompts from the
    # start, behind a prefix, shorter and longer than tiles and strips.
    shapes = [(1, 0, 0), (1, 5, 18), (1, 0, 64), (1, 3, 1199),
              (2, 0, 0), (70, 0, 0), (150, 0, 0), (64, 0, 128), (33, 6, 700)]  # fmt: skip
    lengths = torch.tensor([shape[0] for shape in shapes])
    lows = torch.tensor([shape[1] for shape in shapes])
    starts = torch.tensor([shape[2] for shape in shapes])
    rows = lengths.cumsum(0) - lengths + 1  # a row between is nobody's
    count = int(lengths.sum()) + 3
    qkv = torch.randn(count, query_heads + 2 * kv_heads, width).to(dtype)
    blocks = torch.stack([torch.randperm(num_blocks)[:150] for _ in shapes])
    sinks = torch.randn(query_heads) if window else None
    out = torch.full((count, query_heads, width), 7.0, dtype=dtype)
    scale = width**-0.5
    chunks = torch.stack((rows, lengths, lows, starts))
    kernels.attend_call(qkv, query_heads, pool, scale, window, chunks, blocks)(
        qkv, pool, sinks, out
    )
    for row, length, low, start, pages in zip(
        *(each.tolist() for each in (rows, lengths, lows, starts)), blocks, strict=True
    ):
        end = start + length
        seen = pool[:, pages].flatten(1, 2)[:, low:end].float()
        keys = seen[:kv_heads].repeat_interleave(query_heads // kv_heads, 0)
        values = seen[kv_heads:].repeat_interleave(query_heads // kv_heads, 0)
        query = qkv[row : row + length, :query_heads].float()
        scores = torch.einsum("nhd,hld->hnl", query, keys) * scale
        own = torch.arange(start, end)[:, None]
        slot = torch.arange(low, end)
        hidden = slot > own
        if window is not None and length > 1:  # of a decode, ``low`` says it
            hidden |= slot <= own - window
        scores.masked_fill_(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, length, 1)), 2)
        weights = scores.softmax(-1)[..., : keys.shape[1]]
        close(out[row : row + length], torch.einsum("hnl,hld->nhd", weights, values), dtype)
    assert (out[0] == 7).all(), "other rows are left alone"
    assert (out[-2:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [0, 8, 16])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("count", [1, 30])
def test_mix(
    kernels: Kernels, dtype: torch.dtype, rotary: int, with_norm: bool, count: int
) -> None:
    heads, kv_heads, width, eps = 4, 2, 16, 1e-5
    qkv = torch.randn(count, heads + 2 * kv_heads, width).to(dtype)
    pool = torch.zeros(2 * kv_heads, 10, 4, width, dtype=dtype)
    slots = torch.randperm(40)[:count]
    angles = torch.randn(count, 1, rotary // 2)
    turns = torch.polar(torch.ones_like(angles), angles) if rotary else None
    norm = torch.randn(heads + kv_heads, width) if with_norm else None
    wanted = qkv.float().clone()
    turned = wanted[:, : heads + kv_heads]
    if norm is not None:
        turned.copy_(F.rms_norm(turned, (width,), None, eps) * norm)
    if turns is not None:
        part = turned[..., :rotary]
        if dtype == torch.float32:
            part.copy_(torch.view_as_real(torch.view_as_complex(
                part.unflatten(-1, (-1, 2)).contiguous()
            ) * turns).flatten(-2))  # fmt: skip
        else:
            pairs = part.unflatten(-1, (2, -1))
            both = torch.complex(pairs[..., 0, :], pairs[..., 1, :]) * turns
            part.copy_(torch.cat((both.real, both.imag), -1))
    kernels.mix_call(qkv, heads, turns, slots, pool, eps)(qkv, pool, norm)
    close(qkv, wanted, dtype)
    stored = pool.flatten(1, 2)[:, slots].transpose(0, 1)
    torch.testing.assert_close(stored, qkv[:, heads:])
    assert pool.count_nonzero() <= count * 2 * kv_heads * width


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_rms_norm(kernels: Kernels, dtype: torch.dtype, rows: int) -> None:
    x = (torch.randn(rows, 576) * 3).to(dtype)
    weight = torch.randn(576)
    wanted = F.rms_norm(x.float(), (576,), None, 1e-5)
    close(kernels.rms_norm(x, weight, 1e-5), wanted * weight, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 50])
def test_gated(kernels: Kernels, dtype: torch.dtype, rows: int) -> None:
    gate_up = (torch.randn(rows, 2 * 512) * 8).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -88.0])
    gate, up = gate_up.float().chunk(2, -1)
    close(kernels.gated(gate_up, ACTIVATIONS["silu"]), F.silu(gate) * up, dtype)
    wanted = F.gelu(gate, approximate="tanh") * up
    close(kernels.gated(gate_up, ACTIVATIONS["gelu_pytorch_tanh"]), wanted, dtype)


def quantized(out: int, width: int, bits: int, group: int, *, ordered: bool) -> QuantizedTensor:
    rng = np.random.default_rng(out)
    scale = 0.16 / (1 << bits)
    return QuantizedTensor(
        codes=rng.integers(0, 1 << bits, (out, width), dtype=np.uint8),
        scales=rng.normal(scale, scale / 5, (out, width // group)).astype(np.float32),
        biases=rng.normal(-0.08, 0.01, (out, width // group)).astype(np.float32),
        bits=bits,
        group_size=group,
        columns=None if ordered else rng.permutation(width).astype(np.int32),
    )


# A whole number of blocks and not; one row, a whole number of strips and not; groups inside tiles,
# across tiles and as wide as the weight.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out", [64, 75])
@pytest.mark.parametrize("rows", [1, 2, 5, 13, 96, 200])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 192), (2, 576), (6, 16), (8, 64)])
def test_quantized_linear(
    kernels: Kernels, dtype: torch.dtype, out: int, rows: int, bits: int, group: int
) -> None:
    weight = quantized(out, 576, bits, group, ordered=group != 64)
    bias = torch.randn(out)
    check_linear(
        native_quantized(kernels, weight, bias),
        torch.from_numpy(weight.dequantize()),
        bias,
        rows,
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_dense_linear(kernels: Kernels, dtype: torch.dtype, stored: torch.dtype, rows: int) -> None:
    weight = (torch.randn(75, 200) * 0.1).to(stored)
    check_linear(native_dense(kernels, weight, None), weight.float(), None, rows, dtype)


def check_linear(
    linear: NativeLinear,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    dtype: torch.dtype,
) -> None:
    out, width = weight.shape
    x = torch.randn(rows, width).to(dtype)
    residual = torch.randn(rows, out).to(dtype)
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close(linear(x), wanted, dtype)
    close(linear.add(x, residual), wanted + residual, dtype)


def test_small_weights_stay_small(kernels: Kernels) -> None:
    weight = quantized(512, 512, 4, 128, ordered=True)
    assert native_quantized(kernels, weight, None).nbytes == 512 * 512 // 2 + 2 * 4 * 512 * 4
    dense = torch.zeros(512, 512, dtype=torch.bfloat16)
    assert native_dense(kernels, dense, None).nbytes == 512 * 512 * 2


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "gpt_oss", "smollm3"])
def test_models_without_compiled_kernels(name: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    reference = make_reference(kind, changes)
    reference.save_pretrained(tmp_path)
    config = Config(model=ModelConfig(device="cpu", dtype="float32"))
    runner = load_checkpoint(
        config,
        open_checkpoint(local_directory("tiny", tmp_path)),
        name="tiny",
        fingerprint="",
        native=False,
    )
    driver = Driver(runner, num_blocks=64)
    tokens = {0: list(range(3, 33)), 1: list(range(40, 60)), 2: [9, 8, 7]}
    for seq, ids in tokens.items():
        driver.add(seq, ids)
    steps = [{0: 20, 1: 1}, {0: 1, 1: 13, 2: 2}, *[{0: 1, 1: 1}] * 5, {2: 1, 0: 4, 1: 1}]
    logits = driver.run(steps)
    for seq, got in logits.items():
        wanted = expected(reference, tokens[seq])
        scale = wanted.abs().max()
        torch.testing.assert_close(got / scale, wanted / scale, atol=1e-4, rtol=0)


def test_a_machine_without_compiler_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(NoKernels, match=r"g\+\+"):
        build.load_library(tmp_path)


def test_a_failing_compiler_says_why(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.cpp").write_text("this is no C++\n")
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    monkeypatch.setattr(build, "_SOURCES", ("broken.cpp",))
    monkeypatch.setattr(build, "_HEADERS", ())
    with pytest.raises(NoKernels, match=r"g\+\+ failed: .*broken.cpp"):
        build.load_library(tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so*"))


def test_exponentials_are_accurate(kernels: Kernels) -> None:
    """Through silu: x / (1 + e^-x)."""
    x = torch.linspace(-80, 80, 4096)
    gate_up = torch.stack((x, torch.ones_like(x))).view(1, -1)
    wanted = x.double() / (1 + torch.exp(-x.double()))
    error = (kernels.gated(gate_up, 0)[0].double() - wanted).abs() / wanted.abs().clamp(min=1e-30)
    assert error.max() < 4 * torch.finfo(torch.float32).eps
    assert math.isfinite(error.max())
