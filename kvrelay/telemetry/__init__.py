"""Names, traces and logs. Knows no service; nothing leaves the process unless it was configured to."""
