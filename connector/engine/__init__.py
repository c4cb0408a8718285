"""What runs inside vLLM, and the only code that imports it: facade, scheduler side, worker side, metrics."""
