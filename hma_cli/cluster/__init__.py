"""A prefill/decode pair on this machine: topology, sizing, supervised processes, readiness, proof that KV moves.

settings ─┐
machine ──┼─> topology (argv and environment of every process; pure)
model ────┘        │
                   v
session: starts guarded processes, feeds events to the supervisor's reducer, carries out its effects
                   │
                   v
proof: both engines agree, and a probe's bytes moved
"""
