"""Which tensor-parallel rank holds which shard of a parameter: rules, presets, and their resolution."""
