"""Damaged safetensors files."""

import json
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from benchmarks.fuzz_damage import damage_bytes, damage_json, damage_value, draw_text, draw_value, encode_json


def damage_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes of a safetensors file with damage of its tensors, of its header or of its bytes."""
    kind = rng.random()
    if kind < 0.25:
        return damage_bytes(data, rng)
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    if kind < 0.6:
        return _damage_tensors(header, body, rng)
    if kind < 0.68:
        length = rng.choice((0, 1, 2**62, 2**64 - 1, size + 1, size - 1, 100_000_001))
        return struct.pack("<Q", length) + data[8:]
    if kind < 0.78 and isinstance(header.get("__metadata__"), dict):
        name = rng.choice(list(header["__metadata__"]))
        text = header["__metadata__"][name]
        try:
            damaged: Any = damage_json(text.encode(), rng).decode("utf-8", "replace")
        except ValueError:
            damaged = draw_text(rng)
        header["__metadata__"][name] = damaged if rng.random() < 0.9 else draw_value(rng)
    else:
        header = damage_value(header, rng)
    text = encode_json(header, rng)
    return struct.pack("<Q", len(text)) + text + body


def _damage_tensors(header: Mapping[str, Any], body: bytes, rng: random.Random) -> bytes:
    """Return a valid safetensors file whose tensors are others: renamed, dropped, of another shape or kind."""
    metadata = header.get("__metadata__")
    tensors = load_tensors(header, body)
    for _ in range(rng.choice((1, 1, 2))):
        if not tensors:
            break
        name = rng.choice(list(tensors))
        tensor = tensors[name]
        kind = rng.randrange(9)
        if kind == 0:
            del tensors[name]
        elif kind == 1:
            tensors[rng.choice((draw_text(rng), "../../sentinel/escaped", "optimizer/none/step", "x/y"))] = tensors.pop(
                name
            )
        elif kind == 2:
            tensors[name] = tensor.to(rng.choice((torch.float64, torch.int64, torch.bool, torch.uint8, torch.bfloat16)))
        elif kind == 3:
            tensors[name] = tensor.reshape(-1)[: rng.randrange(max(1, tensor.numel()) + 1)].clone()
        elif kind == 4:
            tensors[name] = tensor[None].clone()
        elif kind == 5 and tensor.is_floating_point():
            tensors[name] = torch.full_like(tensor, rng.choice((float("nan"), float("inf"), 1e38)))
        elif kind == 6:
            tensors[name] = torch.full(tensor.shape, rng.choice((-1, 2**62, 5)), dtype=torch.int64)
        elif kind == 7:
            tensors[name] = torch.zeros(0)
        else:
            tensors[draw_text(rng)] = torch.zeros(rng.randrange(3))
    plain = {name: str(value) for name, value in metadata.items()} if isinstance(metadata, dict) else None
    return bytes(save({name: tensor.contiguous() for name, tensor in tensors.items()}, plain))


def load_tensors(header: Mapping[str, Any], body: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a whole safetensors file."""
    kinds = {"F32": np.float32, "F64": np.float64, "I64": np.int64, "U8": np.uint8, "BOOL": np.bool_, "I32": np.int32}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            array = np.frombuffer(body[begin:end], kinds[entry["dtype"]]).reshape(entry["shape"]).copy()
            tensors[name] = torch.from_numpy(array)
    return tensors
