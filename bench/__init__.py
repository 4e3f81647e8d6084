"""Benches: one script a claim, each prints JSON; peers run side by side in their own environments."""
