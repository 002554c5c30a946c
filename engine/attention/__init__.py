"""Attention over the paged pool: one port, several backends."""
