"""The HMA-enabled NIXL connector for vLLM: plan, wire protocol, transports and the vLLM facade.

Importing this package imports nothing heavy; `connector.engine` is the only part that imports vLLM.
"""

__version__ = "0.1.0"
