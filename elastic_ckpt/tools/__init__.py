"""Tools that need neither an engine nor a GPU: inspect, verify, convert, diff, plan."""
