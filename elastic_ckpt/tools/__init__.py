"""What needs no engine and no GPU: inspect, verify, convert, diff, plan."""
