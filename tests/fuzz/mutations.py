"""Ways to damage a file: random changes of its bytes, and changes that keep an archive or header valid."""

import gzip
import io
import json
import re
import struct
import zipfile
import zlib
from random import Random

EXTREMES = (
    -1,
    0,
    1,
    2,
    255,
    2**15,
    10**8,
    10**9,
    2**31 - 1,
    2**31,
    2**32,
    10**10,
    10**12,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
)
_WORDS = (b"nan", b"inf", b"-inf", b"1e999", b"0x10", b"null", b"true", b"[]", b"{}", b'""', b"\xff\xfe", b"1_0", b"*a")


def mutate(content: bytes, random: Random, *, forged: bool = True) -> bytes:
    """Apply one to three mutations to a file's content; ``forged`` archives have correct checksums."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        choices = [choice for choice in _choices(content) if forged or choice is not _in_archive]
        content = random.choice(choices)(content, random)
    return content


def _choices(content: bytes) -> list:
    blind = [_flip, _flip, _truncate, _swap, _insert, _delete, _overwrite]
    if content[:2] == b"PK":
        return [*blind, *[_in_archive] * 12]
    if content[:6] == b"\x93NUMPY":
        return [*blind, *[_number_in_text] * 6, *[_binary_number] * 6]
    if content[8:10] == b'{"':  # safetensors
        return [*blind, *[_safetensors_header] * 8, _binary_number]
    if content[:2] == b"\x1f\x8b":
        return [*blind, *[_in_gzip] * 10]
    try:
        content.decode()
    except UnicodeDecodeError:
        return [*blind, *[_binary_number] * 4]
    return [*blind, *[_number_in_text] * 8, _word, _nest, _repeat]


def _place(content: bytes, random: Random) -> int:
    return random.randrange(max(1, len(content)))


def _flip(content: bytes, random: Random) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(random.choice((1, 1, 1, 4, 32))):
        changed[_place(changed, random)] ^= 1 << random.randrange(8)
    return bytes(changed)


def _truncate(content: bytes, random: Random) -> bytes:
    return content[: _place(content, random)]


def _swap(content: bytes, random: Random) -> bytes:
    first, second = sorted((_place(content, random), _place(content, random)))
    length = random.randrange(1, 65)
    a, b = content[first : first + length], content[second : second + length]
    return content[:first] + b + content[first + length : second] + a + content[second + length :]


def _insert(content: bytes, random: Random) -> bytes:
    at = _place(content, random)
    return content[:at] + random.randbytes(random.choice((1, 4, 8, 100))) + content[at:]


def _delete(content: bytes, random: Random) -> bytes:
    at = _place(content, random)
    return content[:at] + content[at + random.choice((1, 4, 8, 100)) :]


def _overwrite(content: bytes, random: Random) -> bytes:
    at, length = _place(content, random), random.choice((1, 8, 64))
    return content[:at] + random.choice((b"\0", b"\xff")) * length + content[at + length :]


def _binary_number(content: bytes, random: Random) -> bytes:
    """Replace four or eight bytes by an extreme number."""
    at, size = _place(content, random) // 4 * 4, random.choice((4, 8))
    number = random.choice(EXTREMES) % 2 ** (8 * size)
    return content[:at] + struct.pack("<Q", number)[:size] + content[at + size :]


def _number_in_text(content: bytes, random: Random) -> bytes:
    found = list(re.finditer(rb"-?\d+", content[:100_000]))
    if not found:
        return _insert(content, random)
    match = random.choice(found[: random.choice((3, 1000))])
    number = str(random.choice(EXTREMES)).encode()
    return content[: match.start()] + number + content[match.end() :]


def _word(content: bytes, random: Random) -> bytes:
    found = list(re.finditer(rb"[\w.]+", content)) or [re.match(b"", content)]
    match = random.choice(found)
    return content[: match.start()] + random.choice(_WORDS) + content[match.end() :]


def _nest(content: bytes, random: Random) -> bytes:
    at = _place(content, random)
    return content[:at] + random.choice((b"[", b'{"a":', b"(", b"- ")) * random.choice((3, 5_000)) + content[at:]


def _repeat(content: bytes, random: Random) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    at = random.randrange(len(lines))
    return b"".join(lines[:at] + [lines[at]] * random.choice((2, 300)) + lines[at + 1 :])


def _safetensors_header(content: bytes, random: Random) -> bytes:
    """Change the header, which remains JSON, and keep the tensors after it."""
    (length,) = struct.unpack("<Q", content[:8])
    try:
        header = json.loads(content[8 : 8 + length])
        name = random.choice([key for key in header if key != "__metadata__"])
        field = random.choice(("shape", "data_offsets", "dtype", "name", "text"))
        if field == "dtype":
            header[name]["dtype"] = random.choice(("F64", "F16", "BF16", "I64", "BOOL", "F8_E4M3", "C64", "F4", "x"))
        elif field == "name":
            header[random.choice((name + "x", "x", "a" * 5000))] = header.pop(name)
        elif field == "text":
            text = _number_in_text(json.dumps(header).encode(), random)
            return struct.pack("<Q", len(text)) + text + content[8 + length :]
        else:
            values = header[name][field] or [0]
            values[random.randrange(len(values))] = random.choice(EXTREMES)
            header[name][field] = values
    except (ValueError, LookupError, TypeError, AttributeError):  # mutated before
        return _flip(content, random)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def _in_gzip(content: bytes, random: Random) -> bytes:
    try:
        return gzip.compress(_number_in_text(gzip.decompress(content), random))
    except (OSError, EOFError, zlib.error):
        return _flip(content, random)


def _in_archive(content: bytes, random: Random) -> bytes:
    """Change the entries of an archive, with correct checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            parts = [(entry.filename, archive.read(entry), entry.compress_type) for entry in archive.infolist()]
    except Exception:  # mutated before
        return _flip(content, random)
    if not parts:
        return _flip(content, random)
    at = random.randrange(len(parts))
    name, inside, packing = parts[at]
    action = random.choice(("mutate",) * 8 + ("drop", "rename", "twice", "pack", "other"))
    if action == "mutate":
        inside = random.choice(_choices(inside))(inside, random)
    elif action == "rename":
        name = random.choice((name + "x", "x.npy", "format.npy", "shape.npy", "num_classes.npy"))
    elif action == "other":
        inside = random.choice(parts)[1]
    elif action == "pack":
        packing = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    parts[at : at + 1] = [] if action == "drop" else [(name, inside, packing)] * (2 if action == "twice" else 1)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for entry, inside, packing in parts:
            archive.writestr(zipfile.ZipInfo(entry), inside, packing)
    return file.getvalue()
