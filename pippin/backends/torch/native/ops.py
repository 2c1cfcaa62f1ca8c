"""The compiled kernels as functions of torch tensors. CPU, float32 and bfloat16."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from pippin.backends.torch.native.build import load_library

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_MAX_WIDTH = 512

#: Activations of ``gated``, by the names that configurations use.
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1}


class _Chunks(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in (
            "dtype", "count", "heads", "kv_heads", "width", "block_size", "max_blocks",
            "head_stride", "query_stride", "out_stride", "window",
        )),
        ("scale", c_double),
        *((name, c_void_p) for name in ("rows", "lengths", "blocks", "lows", "starts")),
    ]  # fmt: skip


class _Mix(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in (
            "dtype", "rows", "heads", "kv_heads", "width", "rotary", "pairs", "head_stride",
        )),
        ("eps", c_double),
        ("turns", c_void_p),
        ("slots", c_void_p),
    ]  # fmt: skip


class _Packed(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("kind", "outputs", "inputs", "group")),
        *((name, c_void_p) for name in ("codes", "scales", "biases", "bias")),
    ]  # fmt: skip


class PackedWeight:
    """Made by ``Kernels.pack``."""

    def __init__(self, struct: ctypes.Structure, outputs: int, kept: tuple[Any, ...]) -> None:
        self.outputs = outputs
        self.pointer = ctypes.addressof(struct)
        self.nbytes = sum(tensor.nbytes for tensor in kept if tensor is not None)
        self._struct = struct
        self._kept = kept


class Kernels:
    """See ``kernels.cpp``. All tensors are contiguous unless said otherwise."""

    def __init__(self, cache: Path, threads: int) -> None:
        """Raises ``NoKernels``."""
        library = load_library(cache)
        library.pippin_threads(threads)
        self.library = library
        self._attend = library.pippin_attend
        self._attend.argtypes = [c_void_p] * 5
        self._mix = library.pippin_mix
        self._mix.argtypes = [c_void_p] * 4
        self._rms_norm = library.pippin_rms_norm
        self._rms_norm.argtypes = [c_int64, *[c_void_p] * 3, c_int64, c_int64, c_double]
        self._gated = library.pippin_gated
        self._gated.argtypes = [c_int64, c_void_p, c_void_p, *[c_int64] * 3]
        self._pack = library.pippin_pack
        self._pack.argtypes = [c_void_p, *[c_int64] * 3, c_void_p]
        self._linear = library.pippin_packed_linear
        self._linear.argtypes = [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p]
        for name in ("attend", "mix", "rms_norm", "gated", "pack", "linear"):
            getattr(self, f"_{name}").restype = None
        self._lanes: int = library.pippin_lanes()

    def fits(self, dtype: torch.dtype, *widths: int) -> bool:
        """Whether rows of these widths can be worked on."""
        return dtype in _DTYPES and all(width % self._lanes == 0 for width in widths)

    def fits_head(self, dtype: torch.dtype, width: int) -> bool:
        return width <= _MAX_WIDTH and self.fits(dtype, width)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x`` [rows, width]; ``weight`` float32 [width]."""
        out = torch.empty_like(x)
        rows, width = x.shape
        self._rms_norm(
            _DTYPES[x.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            eps,
        )
        return out

    def gated(self, gate_up: torch.Tensor, activation: int) -> torch.Tensor:
        """``act(gate) * up`` of ``gate_up`` [rows, 2 * width]; [rows, width]."""
        rows, double = gate_up.shape
        out = gate_up.new_empty(rows, double // 2)
        self._gated(
            _DTYPES[gate_up.dtype],
            gate_up.data_ptr(),
            out.data_ptr(),
            rows,
            double // 2,
            activation,
        )
        return out

    def pack(
        self,
        weight: torch.Tensor,
        kind: int,
        bias: torch.Tensor | None,
        *,
        scales: torch.Tensor | None = None,
        biases: torch.Tensor | None = None,
        group: int = 0,
    ) -> PackedWeight:
        """``weight`` [out, in]: for ``kind`` 4 and 8, uint8 codes, with ``scales`` and ``biases``
        float32 [out, in / group]; for 16 bfloat16, for 32 float32. ``bias`` [out]."""
        outputs, inputs = weight.shape
        block = 2 * self._lanes
        blocks = -(-outputs // block)
        packed = torch.empty(blocks * block * inputs * kind // 8, dtype=torch.uint8)
        self._pack(weight.data_ptr(), kind, outputs, inputs, packed.data_ptr())
        if scales is not None and biases is not None:
            scales, biases = (self._by_block(each, blocks) for each in (scales, biases))
        bias = None if bias is None else bias.float().contiguous()
        struct = _Packed(
            kind=kind,
            outputs=outputs,
            inputs=inputs,
            group=group,
            codes=packed.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            biases=None if biases is None else biases.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
        )
        return PackedWeight(struct, outputs, (packed, scales, biases, bias))

    def _by_block(self, values: torch.Tensor, blocks: int) -> torch.Tensor:
        """[out, groups] as [block, group, output within the block]."""
        block = 2 * self._lanes
        outputs, groups = values.shape
        padded = torch.zeros(blocks * block, groups)
        padded[:outputs] = values
        return padded.view(blocks, block, groups).transpose(1, 2).contiguous()

    def linear(
        self, x: torch.Tensor, weight: PackedWeight, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """``x`` [rows, in] times the weight, plus its bias, plus ``residual`` [rows, out]."""
        rows = x.shape[0]
        out = x.new_empty(rows, weight.outputs)
        self._linear(
            weight.pointer,
            _DTYPES[x.dtype],
            x.data_ptr(),
            rows,
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
        )
        return out

    def mix_call(
        self,
        qkv: torch.Tensor,
        heads: int,
        turns: torch.Tensor | None,
        slots: torch.Tensor,
        pool: torch.Tensor,
        eps: float,
    ) -> MixCall:
        """For ``qkv`` [rows, heads + 2 * kv_heads, width] and all pools like ``pool``
        [2 * kv_heads, num_blocks, block_size, width]; ``turns`` complex64 [rows, 1, rotary / 2]."""
        rows, total, width = qkv.shape
        struct = _Mix(
            dtype=_DTYPES[qkv.dtype],
            rows=rows,
            heads=heads,
            kv_heads=(total - heads) // 2,
            width=width,
            rotary=0 if turns is None else 2 * turns.shape[-1],
            pairs=qkv.dtype == torch.float32,
            head_stride=pool.stride(0),
            eps=eps,
            turns=None if turns is None else turns.data_ptr(),
            slots=slots.data_ptr(),
        )
        return MixCall(self._mix, struct, (turns, slots))

    def attend_call(
        self,
        qkv: torch.Tensor,
        heads: int,
        pool: torch.Tensor,
        scale: float,
        window: int | None,
        chunks: torch.Tensor,
        blocks: torch.Tensor,
    ) -> AttendCall:
        """For queries that are the first ``heads`` of ``qkv`` (see ``mix_call``).

        int64: ``chunks`` [4, n], of each chunk its first row of qkv, its rows, the first slot that
        any of them sees, and the slot of the first row's own token; ``blocks`` [n, m], its pages.
        Slots count from the first page's first.
        """
        total, width = qkv.shape[1:]
        rows, lengths, lows, starts = (row.data_ptr() for row in chunks)
        struct = _Chunks(
            dtype=_DTYPES[qkv.dtype],
            count=len(blocks),
            heads=heads,
            kv_heads=(total - heads) // 2,
            width=width,
            block_size=pool.shape[2],
            max_blocks=blocks.shape[1],
            head_stride=pool.stride(0),
            query_stride=total * width,
            out_stride=heads * width,
            window=window or 0,
            scale=scale,
            rows=rows,
            lengths=lengths,
            blocks=blocks.data_ptr(),
            lows=lows,
            starts=starts,
        )
        return AttendCall(self._attend, struct, (chunks, blocks))


class MixCall:
    """Norms, turns and writes to the pages of a step, for any layer of one shape."""

    def __init__(self, function: Any, struct: ctypes.Structure, kept: tuple[Any, ...]) -> None:
        self._function = function
        self._struct = struct
        self._pointer = ctypes.addressof(struct)
        self._kept = kept

    def __call__(self, qkv: torch.Tensor, pool: torch.Tensor, norm: torch.Tensor | None) -> None:
        """``norm``: float32 [heads + kv_heads, width], the weights of the heads' norms."""
        self._function(
            self._pointer,
            qkv.data_ptr(),
            pool.data_ptr(),
            None if norm is None else norm.data_ptr(),
        )


class AttendCall:
    """Attention of a step's chunks, for any layer of one shape."""

    def __init__(self, function: Any, struct: ctypes.Structure, kept: tuple[Any, ...]) -> None:
        self._function = function
        self._struct = struct
        self._pointer = ctypes.addressof(struct)
        self._kept = kept

    def __call__(
        self,
        qkv: torch.Tensor,
        pool: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Writes the chunks' rows of ``out`` [rows, heads, width]; ``sinks`` float32 [heads]."""
        self._function(
            self._pointer,
            qkv.data_ptr(),
            pool.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
        )
