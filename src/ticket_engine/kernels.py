"""Element-wise work of a pass, each piece in one walk over memory, compiled for this processor by numba.

Stock layers take several passes over their buffers for a norm, an activation or a softmax, each with a
buffer of its own; on the development machine that is a quarter of a packed bfloat16 pass. The kernels
compute in float32, read and write bfloat16 (as its 16 bits, NumPy has no such type) or float32, and run
on the calling thread without Python's lock: they are for passes of one thread each, `available` says when.

Compiled once a machine (about 5 s), kept beside this file or in the user's cache by numba.
"""

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

_OPTIONS = {
    "nogil": True,
    "boundscheck": False,
    "cache": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc", "nsz", "arcp"},  # not "nnan": NaN must come through
}
_LOG2_E = np.float32(1.4426950408889634)
_SIGN_FREE = np.int32(0x7FFFFFFF)


def available(dtype: torch.dtype) -> bool:
    """Whether the kernels may take the place of stock operations: right number format, one thread a pass."""
    return dtype in (torch.bfloat16, torch.float32) and torch.get_num_threads() == 1


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``hidden / sqrt(mean(hidden^2) + epsilon) * weight`` over the last dimension; same shape and type.

    Args:
        hidden: Contiguous.
        weight: ``(last dimension,)`` in the same number format.
        epsilon: Added to the mean.
    """
    output = torch.empty_like(hidden)
    rows = hidden.view(-1, hidden.shape[-1])
    _rms_norm(_numbers(rows), _numbers(weight), np.float32(epsilon), _numbers(output.view_as(rows)))
    return output


def gated_silu_(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` written over ``gate``. Both contiguous and of one shape."""
    _gated_silu(_numbers(gate).reshape(-1), _numbers(up).reshape(-1))
    return gate


def causal_weights_(scores: Tensor, scale: float) -> Tensor:
    """Overwrite products by unnormalised attention weights; returns what to multiply the mixed values with.

    Row ``r`` of ``rows`` sees all keys but the last ``rows - 1 - r``; what it does not see becomes 0, what it
    sees ``exp(scale * (score - largest))``, so at most 1.

    Args:
        scores: ``(blocks, rows, keys)``, contiguous.
        scale: Above 0.

    Returns:
        float32 ``(blocks, rows)``: 1 over the sum of each row.
    """
    inverse = torch.empty(scores.shape[:2])
    _causal_weights(_numbers(scores), np.float32(scale), inverse.numpy())
    return inverse


def place_scaled(mixed: Tensor, inverse: Tensor, output: Tensor, first: int) -> None:
    """Write ``mixed * inverse`` of some equally long tickets to their rows of the output.

    Args:
        mixed: ``(tickets, heads, rows, size)``, contiguous.
        inverse: float32 ``(tickets, heads, rows)``.
        output: ``(tickets, length, heads, size)``, contiguous.
        first: Row of a ticket at which its ``rows`` begin.
    """
    _place_scaled(_numbers(mixed), inverse.numpy(), _numbers(output), first)


def _numbers(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as NumPy sees it: float32, or the 16 bits of bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@intrinsic
def _bits(_context, number):
    """A float32 as the int32 of the same bits."""
    return types.int32(types.float32), lambda _c, builder, _s, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def _from_bits(_context, bits):
    """The other way round."""
    return types.float32(types.int32), lambda _c, builder, _s, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _nearest(_context, number):
    """Nearest whole number as int32; NumPy's own rounding is a call that keeps loops from being vectorised."""

    def generate(_c, builder, _s, args):
        rounded = builder.call(builder.module.declare_intrinsic("llvm.rint", [ir.FloatType()]), args)
        return builder.fptosi(rounded, ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def _load(_context, stored):
    """A stored number as float32."""

    def widen(_c, builder, _s, args):
        wide = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    if stored == types.float32:
        return types.float32(types.float32), lambda _c, _b, _s, args: args[0]
    return types.float32(types.uint16), widen


@intrinsic
def _store(_context, number, like):
    """A float32 in the format of ``like``, rounded to nearest even.

    A NaN stays one: those of arithmetic and of bfloat16 have low bits of 0, so that rounding adds nothing.
    """

    def narrow(_c, builder, _s, args):
        bits = builder.bitcast(args[0], ir.IntType(32))
        sixteen, one = ir.Constant(ir.IntType(32), 16), ir.Constant(ir.IntType(32), 1)
        odd = builder.and_(builder.lshr(bits, sixteen), one)
        rounded = builder.add(bits, builder.add(odd, ir.Constant(ir.IntType(32), 0x7FFF)))
        return builder.trunc(builder.lshr(rounded, sixteen), ir.IntType(16))

    if like == types.float32:
        return types.float32(types.float32, types.float32), lambda _c, _b, _s, args: args[0]
    return types.uint16(types.float32, types.uint16), narrow


@njit(inline="always", **_OPTIONS)
def _exp2(exponent):
    """2 to a float32 power between -126 and 127 (cut there), relative error below 3e-7.

    NaN comes through: comparisons with it are false, so nothing is cut.
    """
    exponent = np.float32(-126.0) if exponent < np.float32(-126.0) else exponent
    exponent = np.float32(127.0) if exponent > np.float32(127.0) else exponent
    whole = _nearest(exponent)
    part = exponent - np.float32(whole)
    value = np.float32(1.5403530e-4)  # powers of log(2) over factorials: the series of 2^part, |part| <= 1/2
    value = value * part + np.float32(1.3333558e-3)
    value = value * part + np.float32(9.6181291e-3)
    value = value * part + np.float32(5.5504109e-2)
    value = value * part + np.float32(2.4022651e-1)
    value = value * part + np.float32(6.9314718e-1)
    value = value * part + np.float32(1.0)
    return value * _from_bits(np.int32((whole + np.int32(127)) << np.int32(23)))


@njit(**_OPTIONS)
def _rms_norm(hidden, weight, epsilon, output):
    for row in range(hidden.shape[0]):
        total = np.float32(0)
        for column in range(hidden.shape[1]):
            number = _load(hidden[row, column])
            total += number * number
        factor = np.float32(1) / np.sqrt(total / np.float32(hidden.shape[1]) + epsilon)
        for column in range(hidden.shape[1]):
            scaled = _load(_store(_load(hidden[row, column]) * factor, hidden[row, column]))
            output[row, column] = _store(scaled * _load(weight[column]), hidden[row, column])


@njit(**_OPTIONS)
def _gated_silu(gate, up):
    for index in range(gate.shape[0]):
        number = _load(gate[index])
        active = number / (np.float32(1) + _exp2(-number * _LOG2_E))
        gate[index] = _store(_load(_store(active, gate[index])) * _load(up[index]), gate[index])


@njit(**_OPTIONS)
def _causal_weights(scores, scale, inverse):
    blocks, rows, keys = scores.shape
    factor = np.float32(scale * _LOG2_E)
    for block in range(blocks):
        for row in range(rows):
            seen = keys - (rows - 1 - row)
            line = scores[block, row]
            largest = np.int32(-0x80000000)
            for key in range(seen):  # whole numbers in the order of the floats: their maximum is vectorised
                bits = _bits(_load(line[key]))
                bits = np.int32(bits ^ ((bits >> np.int32(31)) & _SIGN_FREE))
                largest = max(largest, bits)
            largest = np.int32(largest ^ ((largest >> np.int32(31)) & _SIGN_FREE))
            top = _from_bits(largest)
            total = np.float32(0)
            for key in range(seen):
                weight = _exp2((_load(line[key]) - top) * factor)
                line[key] = _store(weight, line[key])
                total += weight
            for key in range(seen, keys):
                line[key] = 0
            inverse[block, row] = np.float32(1) / total


@njit(**_OPTIONS)
def _place_scaled(mixed, inverse, output, first):
    tickets, heads, rows, size = mixed.shape
    for ticket in range(tickets):
        for row in range(rows):
            for head in range(heads):
                factor = inverse[ticket, head, row]
                for column in range(size):
                    number = mixed[ticket, head, row, column]
                    output[ticket, first + row, head, column] = _store(_load(number) * factor, number)
