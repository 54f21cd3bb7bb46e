"""Hostile and damaged files for the reader of ``torch.save`` archives: its attack surface, tried piece by piece."""
