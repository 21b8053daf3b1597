"""The bytes of tensors: as they are and compressed, and the threads that copy them."""

from __future__ import annotations

import functools
import sys
import zlib
from types import ModuleType
from typing import cast

import torch

from engram import _core
from engram._support.checks import check_count


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in memory of the processor, uint8 ``[n]``: a view of a contiguous one, else of a copy."""
    dense = tensor.detach().contiguous()
    # Not reshape: a single value is contiguous whatever its stride, and keeps that.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def set_num_threads(n: int) -> None:
    """Use ``n`` threads for copies of large batches, the calling thread included.

    Small batches (below 512 KiB) always use the calling thread alone. The default is the number of cores, at most 4.
    Results never depend on it.

    Args:
        n: threads in ``[1, 1024]``.

    Raises:
        ValueError: ``n`` is outside the range.
        TypeError: ``n`` is not an int.

    >>> import engram
    >>> engram.set_num_threads(2)
    >>> engram.num_threads()
    2
    """
    _core.set_num_threads(check_count("set_num_threads", n, "threads", most=1024))


def num_threads() -> int:
    """Threads that a large copy may use, the calling thread included.

    >>> import engram
    >>> engram.num_threads() >= 1
    True
    """
    return int(_core.num_threads())


#: What a stream of Zstandard's begins with.
_ZSTD = b"\x28\xb5\x2f\xfd"


@functools.cache
def zstd() -> ModuleType | None:
    """Zstandard, of the standard library or its backport; None: there is none."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ModuleNotFoundError:
        return None
    return zstd


def deflated(data: bytes, level: int) -> bytes:
    """A stream of Zstandard's; where there is none of zlib's, at the nearest level that it has. Both tell damage."""
    module = zstd()
    if module is None:
        return zlib.compress(data, min(max(level or 6, 1), 9))
    kind = module.CompressionParameter
    return cast("bytes", module.compress(data, options={kind.compression_level: level, kind.checksum_flag: 1}))


def is_stream(data: bytes) -> bool:
    """Whether bytes begin as a stream of zlib's or Zstandard's does."""
    deflated = len(data) > 1 and data[0] & 15 == zlib.DEFLATED and int.from_bytes(data[:2]) % 31 == 0
    return deflated or data.startswith(_ZSTD)


def inflated(data: bytes, nbytes: int, who: str) -> bytes:
    """What a stream of zlib's or Zstandard's holds. Of one that holds more than it should, no more is made.

    Args:
        data: the stream.
        nbytes: how many bytes it must hold.
        who: what messages begin with that say that there is no Zstandard.

    Raises:
        ValueError: it is damaged, or holds another number of bytes.
        ModuleNotFoundError: there is no Zstandard.
    """
    kind: type[Exception] = zlib.error
    if data.startswith(_ZSTD):
        module = zstd()
        if module is None:
            raise ModuleNotFoundError(
                f"{who}: expected Zstandard, which wrote this stream, got none. It is part of Python from 3.14 on. Before: pip install "
                "'engram-replay[zstd]', or pass compression_fn and decompression_fn."
            )
        stream, kind = module.ZstdDecompressor(), module.ZstdError
    else:
        stream = zlib.decompressobj()
    try:
        made: bytes = stream.decompress(data, nbytes + 1)  # not 0, which means any number
    except kind as error:
        raise ValueError(f"expected a stream of {nbytes} bytes, got a damaged one ({error})") from error
    if len(made) > nbytes:
        raise ValueError(f"expected a stream of {nbytes} bytes, got one of more")
    if len(made) < nbytes or not stream.eof or stream.unused_data:
        raise ValueError(f"expected a stream of {nbytes} bytes, got one of {len(made)} that is cut off or goes on")
    return made
