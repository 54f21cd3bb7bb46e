"""What optimizer states are, and where each optimizer keeps its step count."""
