"""The length of a GGUF file by its header, which is read without the vocabulary's numbers and without the weights."""

from __future__ import annotations

import math
from typing import BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

VERSIONS = (2, 3)  # of little-endian files; others are left to the loader
NUMBER_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by type of a value
TEXT, LIST = 8, 9  # other types of a value


def length_of(file: BinaryIO) -> int:
    """The least number of bytes of the complete file; 0 for other versions.

    Raises EOFError, ValueError, KeyError, OverflowError or MemoryError for a damaged header.
    """

    def number(size: int = 8) -> int:
        piece = file.read(size)
        if len(piece) < size:
            raise EOFError
        return int.from_bytes(piece, "little")

    def value(kind: int) -> bytes | int | None:
        if kind == TEXT:
            return file.read(number())
        if kind != LIST:
            return number(NUMBER_BYTES[kind])
        of, count = number(4), number()
        if of in NUMBER_BYTES:
            file.seek(count * NUMBER_BYTES[of], 1)
        else:
            for _ in range(count):
                value(of)
        return None

    file.seek(4)  # behind the magic
    if number(4) not in VERSIONS:
        return 0
    tensors, pairs = number(), number()
    values = {value(TEXT): value(number(4)) for _ in range(pairs)}
    ends = []
    for _ in range(tensors):
        value(TEXT)
        elements = math.prod(number() for _ in range(number(4)))
        of_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(number(4))]
        ends.append(number() + elements // of_block * block_bytes)
    alignment = values.get(b"general.alignment", 32)
    return -(-file.tell() // alignment) * alignment + max(ends, default=0)
