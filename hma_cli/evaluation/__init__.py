"""Does a pair answer as a single engine does? lm-eval arms, per-sample pairing, verdict.

questions ──> task (lm-eval's gsm8k) ──> arm: baseline ──┐
                                    └──> arm: pair ──────┼──> verdict (pure)
metrics of prefill and decode, before and after ──> evidence ──┘
"""
