"""How fast checkpoints come back, and at what cost: ``python -m benchmarks.run``, ``python -m benchmarks.flat``."""
