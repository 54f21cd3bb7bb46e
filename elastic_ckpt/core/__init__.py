"""Pure data and arithmetic: what a checkpoint holds, what a live engine holds, and the plan between them."""
