"""Which tensor-parallel rank holds which part of a parameter: rules, presets, and their resolution."""
