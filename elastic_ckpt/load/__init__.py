"""One load, from the hook to the commit."""
