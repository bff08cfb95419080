"""The bytes and the text of single tokens, as log-probabilities show them.

Invariant: the bytes of an answer's ordinary tokens, joined, are the UTF-8 bytes of its text (for byte-level and
byte-fallback tokenizers, up to a first space that some decoders strip).
"""

import json
from functools import cached_property, lru_cache

from truegate.engine.tokenizer import Tokenizer


class Vocabulary:
    """Token id to bytes and text; built once, answers from a table."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}

    def bytes(self, token_id: int) -> bytes:
        """The bytes this token stands for; empty for an id that the tokenizer does not know."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._look_up(token_id)
        return found

    def text(self, token_id: int) -> str:
        return self.bytes(token_id).decode("utf-8", errors="replace")

    def num_characters(self, token_id: int) -> int:
        """Characters that begin in this token."""
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes(token_id))

    @cached_property
    def max_bytes_per_token(self) -> int | None:
        """No token covers more bytes of a text than this; None where the tokenizer may rewrite or skip text."""
        settings = json.loads(self.tokenizer.backend.to_str())
        added = self.tokenizer.backend.get_added_tokens_decoder().values()
        if settings.get("normalizer") is not None or any(token.lstrip or token.rstrip for token in added):
            return None
        return max(len(self.bytes(token_id)) for token_id in self.tokenizer.backend.get_vocab().values())

    def _look_up(self, token_id: int) -> bytes:
        token = self.tokenizer.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added or not self._kind:
            return token.encode()
        if self._kind == "byte-level":
            table = _byte_level_table()
            return b"".join(bytes([table[char]]) if char in table else char.encode() for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.tokenizer.backend.get_added_tokens_decoder())

    @cached_property
    def _kind(self) -> str:
        """How the tokenizer writes bytes, read from its own decoder."""
        decoder = json.loads(self.tokenizer.backend.to_str()).get("decoder") or {}
        kinds = [part.get("type") for part in decoder.get("decoders", [decoder])]
        if "ByteLevel" in kinds:
            return "byte-level"
        return "byte-fallback" if "ByteFallback" in kinds or "Metaspace" in kinds else ""


@lru_cache(maxsize=1)
def _byte_level_table() -> dict[str, int]:
    """Character to byte of byte-level BPE: printable Latin-1 stands for itself, the rest for 256, 257, ... in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in table]
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
