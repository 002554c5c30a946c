"""Why tokens came late, from traces that were recorded. Knows files and numbers, and no process that runs."""
