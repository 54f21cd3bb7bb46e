"""The counters of an engine that does not exist."""

from __future__ import annotations

from elastic_ckpt.data import Trained


class Counting:
    """The counters of an engine, as DeepSpeed keeps them."""

    def __init__(self, ranks: int, batch: int, accumulation: int = 1) -> None:
        self.micro_batch, self.accumulation, self.samples, self.in_flight = ranks * batch, accumulation, 0, 0

    def train(self) -> None:
        """One micro-batch."""
        self.in_flight += 1
        if self.in_flight == self.accumulation:
            self.samples, self.in_flight = self.samples + self.accumulation * self.micro_batch, 0

    def __call__(self) -> Trained:
        return Trained(self.samples, self.micro_batch, self.in_flight, self.accumulation)
