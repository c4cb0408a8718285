"""The control plane without I/O: messages, codec, prompt digest, peer comparison, offer and claim tables."""
