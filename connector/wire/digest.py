"""The prompt digest: two prompts have one digest only if their KV caches are the same."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence

DIGEST_BYTES = 32


def prompt_digest(token_ids: Sequence[int], *, adapter: str = "", salt: str = "", media: Iterable[str] = ()) -> bytes:
    """BLAKE2b-256 over the token ids and whatever else changes the KV of a prompt.

    adapter: name of the LoRA adapter. salt: the request's `cache_salt`. media: hashes and places of multimodal inputs.
    """
    # JSON escapes what is not valid Unicode, so that no text of a client can fail here.
    header = json.dumps(["hma.prompt/1", len(token_ids), adapter, salt, list(media)]).encode()
    digest = hashlib.blake2b(len(header).to_bytes(4, "little") + header, digest_size=DIGEST_BYTES)
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()
