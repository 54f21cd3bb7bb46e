"""CheckpointMetadata x LocalState -> ReadPlan."""
