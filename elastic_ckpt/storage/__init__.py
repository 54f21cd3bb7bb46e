"""The door to a checkpoint's files: what opens them, and lists their folders."""
