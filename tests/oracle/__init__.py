"""Independent checks of plans, which know nothing of how a plan is made."""
