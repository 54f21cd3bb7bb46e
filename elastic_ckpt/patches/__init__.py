"""Opt-in patches of training, not of loading."""
