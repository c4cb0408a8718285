"""Real pairs of vLLM servers under faults: what clients got, what the metrics say, what stays held.

`servers` and `gate` are what can be hurt, `client` asks as a router does and judges every answer, `faults` is the list
of single misfortunes (`scripts/faults` runs it for both connectors and writes docs/reliability.md), `schedule` and
`soak` are many of them at random (`scripts/soak`).
"""
