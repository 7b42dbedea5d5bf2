"""Checks of a checkpoint's payload: plain tensors and values, no larger than the file.

`torch.load(weights_only=True)` executes nothing, but it builds whatever the file asks for: a few
bytes can ask for a tensor of terabytes, or be the compressed form of far more bytes. A training's
state, as `torch.save` writes it, needs none of that.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

# levels of nested containers; the limit also ends the walk through a container that holds itself
MAX_DEPTH = 64
# Size of the pickle, with names, numbers, texts and shapes; it does not hold the tensors' bytes.
# The random numbers of a script's workers are texts, of 65 MB for a thousand of them.
MAX_PICKLE_BYTES = 1024**3
# Instructions of the pickle. A tensor and its name take some 25, so there is room for 160,000
# tensors. The most expensive, one byte for an empty dictionary, takes 64 bytes of memory.
MAX_INSTRUCTIONS = 4_000_000
# bytes of a text that count like an instruction: what is within the bound on these is within both
TEXT_BYTES = 256
# instructions for the names of functions and types when they first occur, and for both ends
REFERENCES = 32
# torch's loader accepts sets, but states hold none, and one byte makes more than 200 bytes
_SETS = {"EMPTY_SET", "FROZENSET"}
PLAIN_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
# start of torch.save's format; `save` never wrote an older one
_ZIP = b"PK\x03\x04"
# references that a state may hold: functions that give a storage a shape, and types of storages
_KNOWN = re.compile(
    r"collections (OrderedDict|Counter)|"
    r"torch\._utils _rebuild_(tensor_v2|parameter|parameter_with_state)|"
    r"torch (Half|BFloat16|Float|Double|Byte|Char|Short|Int|Long|Bool|ComplexFloat|ComplexDouble)"
    r"Storage"
)


class PayloadError(ValueError):
    """Error of a payload; the message is the rest of a sentence that begins with the file."""


def check_archive(payload: bytes) -> None:
    """Check a payload before it is loaded.

    Raises:
        PayloadError: `torch.save` would not write this for a training's state.
        zipfile.BadZipFile: The payload is no archive. Other errors of malformed archives and
            pickles are possible, too.
    """
    if not payload.startswith(_ZIP):
        raise PayloadError("does not hold what torch.save writes")
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        pickles = [entry for entry in entries if entry.filename.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1 or len(set(names)) != len(names):
            raise PayloadError("does not hold what torch.save writes")
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise PayloadError("is compressed; torch.save compresses nothing")
        if pickles[0].file_size > MAX_PICKLE_BYTES:
            raise PayloadError("holds too many names and numbers")
        pickled = archive.read(pickles[0])
    _check_instructions(pickled)


def _check_instructions(pickled: bytes) -> None:
    for count, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
        if count >= MAX_INSTRUCTIONS:
            raise PayloadError("holds too many names and numbers")
        if opcode.name in _SETS:
            raise PayloadError("holds what may not be loaded: a set")
        refers = "GLOBAL" in opcode.name or opcode.name == "INST"
        if refers and not (opcode.name == "GLOBAL" and _KNOWN.fullmatch(str(argument))):
            name = str(argument or "something unknown").replace(" ", ".")
            raise PayloadError(f"holds what may not be loaded: a reference to {name}")


def instructions_of(value: Any) -> int:
    """Return the most instructions that a value takes in a pickle, without values inside it."""
    if isinstance(value, Tensor):
        # 22, and those of its shape and strides
        count = 28 + 2 * value.dim()
        return count + 20 if isinstance(value, Parameter) else count
    if isinstance(value, str):
        return 2 + len(value.encode(errors="surrogatepass")) // TEXT_BYTES
    if isinstance(value, dict | list | tuple):
        plain = type(value) in (dict, list, tuple)
        # two for each thousand values
        return (5 if plain else 12) + len(value) // 500
    return 1


def why_too_large(instructions: int) -> str:
    """Say why a state of at most so many instructions could not be loaded; "" if it could."""
    if instructions + REFERENCES <= MAX_INSTRUCTIONS:
        return ""
    return "holds too many names and numbers; keep long lists of numbers as tensors"


def check_loaded(state: Any, most_bytes: int) -> None:
    """Check the loaded content before anything reads its numbers.

    The tensors may not take more than `most_bytes`, the size of the payload.

    Raises:
        PayloadError: A tensor claims more bytes than the payload has, or containers are nested too
            deeply.
    """
    todo: list[tuple[Any, int]] = [(state, 0)]
    containers: set[int] = set()
    # bytes of each storage, by its address
    storages: dict[int, int] = {}
    while todo:
        value, depth = todo.pop()
        if isinstance(value, Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            if value.nbytes > most_bytes:
                raise PayloadError("holds a tensor that is larger than the file")
        elif isinstance(value, dict | list | tuple) and id(value) not in containers:
            if depth > MAX_DEPTH:
                raise PayloadError(f"is nested deeper than {MAX_DEPTH} levels")
            containers.add(id(value))
            items = value.values() if isinstance(value, dict) else value
            todo += [(item, depth + 1) for item in items]
    if sum(storages.values()) > most_bytes:
        raise PayloadError("holds tensors that are larger than the file")


def why_not_plain(tensor: Tensor) -> str:
    """Name the trait that would keep a tensor from being loaded again; empty if there is none."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return "a tensor without a plain storage"
    if tensor.dtype not in PLAIN_DTYPES:
        return f"a tensor of {tensor.dtype}"
    if type(tensor) is Tensor and vars(tensor):
        return f"a tensor with an attribute {next(iter(vars(tensor)))!r}"
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        return "an expanded tensor"
    return ""
