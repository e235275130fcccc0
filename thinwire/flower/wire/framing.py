"""How the lane puts JSON and parts into one body: blocks of a 4-byte little-endian length and that many bytes.

hello, join: [JSON]. pull: [JSON] up; [control JSON] [ask, maybe empty] parts.. down. push: [head] parts.. up. Parts of
more than `INLINE_BYTES` together travel apart, where a cut can be gone on from (flower/lane/: bundle.py, uploads.py).
A block of JSON is deflated (RFC 1951) against words that both ends know: a head is then little more than its digests.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence

from thinwire.core.types import Part

LENGTH = struct.Struct("<I")
INLINE_BYTES = 256 * 2**10
STREAM_BYTES = 2**20  # read, hashed and written at once
LEVEL = 6

# What heads have in common, the most frequent last (RFC 1951 finds near words cheaper). It belongs to protocol 1.
WORDS = (
    b'{"process":"","wait_s":24.0,"held":["1."]}{"cancelled":[]}{"name":"","process":"","tasks":[{"name":"","version":"'
    b'","source_digest":"","layout_digest":"","codecs":["identity","fp16","int8","topk"],"error":""}],"versions":{"'
    b'thinwire":"0.","python":"3.1","torch":"2.","machine":"x86_64","system":"Linux"},"protocol":1,"oldest":1,"link":{"'
    b'rtt_s":0.0,"skew_s":0.0},"holds":[""],"plans":[""]}{"name":"","sequences":{"},"poll_s":240.0,"server_time":17,"'
    b'protocol":1,"spread_s":0.0,"cas":[]}{"kind":"task-error","text":"","ask_id":"","device":"","protocol":1,"'
    b'transfer":null,"type":"failure"}{"ask_id":"-1.1.","update_id":"-1//1","base_version":1,"examples":1,"steps":1,"a'
    b'":1.0,"norm":0.0,"metrics":{"eval/loss":[0.0,1.0],"eval/accuracy":[0.0,1.0],"train/loss":[0.0,1.0]},"timings":{"'
    b'download_s":0.0,"queue_s":0.0,"evaluate_s":0.0,"train_s":0.0,"encode_s":0.0},"parts":[{"name":"frame/0","length"'
    b':1,"sha256":"","offset":0},{"name":"buffers","length":1,"sha256":""}],"codec":"topk(0.01) > int8 > zstd","'
    b'counters":{},"residual_norm":0.0,"protocol":1,"transfer":null,"type":"reply"}{"ask_id":"-1.1.","run":"-1","task":'
    b'"","kind":"evaluate","kind":"train","plan":"","round":1,"base_version":1,"base_digest":"","layout_digest":"","'
    b'codec":"topk(0.01) > int8 > zstd","work":{"steps":0,"batch":32},"deadline_s":60.0,"parts":[{"name":"full/0","'
    b'length":1,"sha256":"","offset":0}],"vectors":[],"verdicts":[{"update_id":"-1//1","outcome":"dropped","version":1}'
    b',{"update_id":"-1//1","outcome":"folded","version":1}],"protocol":1}'
)


def block(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def packed(json: bytes) -> bytes:
    """A block of JSON, deflated."""
    deflate = zlib.compressobj(LEVEL, wbits=-zlib.MAX_WBITS, zdict=WORDS)
    return block(deflate.compress(json) + deflate.flush())


def inflated(data: bytes, most: int) -> bytes:
    """The JSON of a block; ValueError where it is damaged or longer than `most` bytes: never more than that is made.

    >>> inflated(packed(b'{"round":1}')[4:], 100)
    b'{"round":1}'
    """
    inflate = zlib.decompressobj(wbits=-zlib.MAX_WBITS, zdict=WORDS)
    try:
        found = inflate.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"a block cannot be read: {error}") from error
    if len(found) > most:
        raise ValueError(f"a block of more than {most} bytes")
    if not inflate.eof or inflate.unused_data:
        raise ValueError("a block is cut short, or more follows in it")
    return found


def unblock(data: bytes) -> tuple[bytes, memoryview]:
    """The first block, and what follows it; ValueError where it is cut short."""
    if len(data) < LENGTH.size:
        raise ValueError("a body without a block")
    (length,) = LENGTH.unpack_from(data)
    if LENGTH.size + length > len(data):
        raise ValueError("a block is longer than its body")
    return data[LENGTH.size : LENGTH.size + length], memoryview(data)[LENGTH.size + length :]


def etag(parts: Sequence[Part]) -> str:
    """What the parts are, one after the other: the same for every ask that carries them."""
    return '"' + hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest() + '"'
