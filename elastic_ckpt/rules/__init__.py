"""Which tensor-parallel rank holds what of a parameter: said by the user, the checkpoint, the model, or its shapes."""
