"""Frameworks on top of DeepSpeed, each run for real: their own save, their own resume, another number of ranks."""
