"""Allocator settings that keep the buffers of a forward pass in the process."""

import ctypes
import logging
import sys

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_IN_HEAP_BYTES = 64 * 2**20  # larger blocks are mapped and returned: weights, full-vocabulary logits
_KEEP_BYTES = 256 * 2**20


def keep_freed_memory() -> bool:
    """True where glibc was told to keep freed memory for the next pass instead of returning it.

    A pass allocates and frees the same few hundred buffers again and again. By default glibc maps each
    large one anew and the kernel zeroes its pages at first touch: on the development machine that was
    half of all element-wise time (SmolLM2, bfloat16, 4,096 tokens a pass). At most 256 MB of freed
    memory at the heap's end stay with the process. Call it after the weights are loaded.
    """
    if sys.platform != "linux":
        return False
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # musl
        return False
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _IN_HEAP_BYTES), (_M_TRIM_THRESHOLD, _KEEP_BYTES))
    return all(libc.mallopt(parameter, value) == 1 for parameter, value in settings)
