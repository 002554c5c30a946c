"""What is wrong with a machine, a configuration or a cluster, and what to do: verdicts on facts. Measures nothing."""
