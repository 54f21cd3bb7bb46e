"""Executes a ReadPlan: coalesced reads, staging buffers, requantization, broadcasts."""
